//! How much the time of a micro-batch varies. Attention takes longer on packed sequences with long documents; all other
//! kernels depend on the number of tokens alone.

use std::ops::{Add, AddAssign, Mul};

use catalog::Seconds;

/// How much the time of a kernel, or of a sum of kernels, varies from micro-batch to micro-batch. A micro-batch that is
/// slow in one kernel is slow in all, so the deviations of a sum add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Standard deviation of the time of one micro-batch.
    pub deviation: Seconds,
    /// Largest possible excess over the mean: that of a micro-batch whose documents all have the slowest length.
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
