//! How much longer than on average a micro-batch may take: packed sequences whose documents differ in length differ in
//! attention, while everything else depends on the number of tokens alone.

use std::ops::{Add, AddAssign, Mul};

use catalog::Seconds;

/// How the time of a piece of work is spread over micro-batches. Works on the same micro-batches are long together: their
/// spreads add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Standard deviation.
    pub deviation: Seconds,
    /// The most by which a micro-batch can exceed the mean: all its documents would have the length that takes longest.
    pub most: Seconds,
}

impl Add for Spread {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            deviation: self.deviation + other.deviation,
            most: self.most + other.most,
        }
    }
}

impl AddAssign for Spread {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<f64> for Spread {
    type Output = Self;
    fn mul(self, times: f64) -> Self {
        Self {
            deviation: self.deviation * times,
            most: self.most * times,
        }
    }
}
