//! Quantities with a dimension.
//!
//! Counts and bytes are integers, time and FLOPs are `f64`. Division across types gives the
//! physical result: `Bytes / Bandwidth = Seconds`, `Flops / FlopRate = Seconds`. Every type parses
//! from and prints to the notation people write: `"80 GiB"`, `"3.35 TB/s"`, `"989 TFLOP/s"`.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

/// A number of floating-point operations (a multiply-add counts two).
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Flops(pub f64);

/// Floating-point operations per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct FlopRate(pub f64);

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Bandwidth(pub f64);

macro_rules! additive {
    ($($t:ident),*) => {$(
        impl Add for $t {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }
        impl Sub for $t {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl AddAssign for $t {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }
        impl SubAssign for $t {
            fn sub_assign(&mut self, other: Self) {
                self.0 -= other.0;
            }
        }
        impl Sum for $t {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::default(), Add::add)
            }
        }
    )*};
}
additive!(Bytes, Seconds, Flops, FlopRate, Bandwidth);

macro_rules! scaled_by_f64 {
    ($($t:ident),*) => {$(
        impl Mul<f64> for $t {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }
        impl Div<f64> for $t {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }
        impl Div for $t {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }
        impl $t {
            /// The larger of two values, by total order.
            #[must_use]
            pub fn max(self, other: Self) -> Self {
                Self(self.0.max(other.0))
            }
            /// The smaller of two values, by total order.
            #[must_use]
            pub fn min(self, other: Self) -> Self {
                Self(self.0.min(other.0))
            }
        }
    )*};
}
scaled_by_f64!(Seconds, Flops, FlopRate, Bandwidth);

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, count: u64) -> Self {
        Self(self.0 * count)
    }
}

impl Bytes {
    /// The size as a float, for ratios.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// An equal share among `parts`, rounded up: the largest shard.
    #[must_use]
    pub fn div_ceil(self, parts: u64) -> Self {
        Self(self.0.div_ceil(parts))
    }

    /// Difference that stops at zero.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Div<Bandwidth> for Bytes {
    type Output = Seconds;
    fn div(self, bandwidth: Bandwidth) -> Seconds {
        Seconds(self.0 as f64 / bandwidth.0)
    }
}

impl Div<FlopRate> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopRate) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}
