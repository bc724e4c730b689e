//! Time in whole picoseconds, in which streams and the engine count.
//!
//! Sums of integers do not depend on their order, and a pipeline whose state repeats does so exactly: its step need not be
//! simulated to the end (`engine`). Durations are rounded up, so that lower bounds, which are not rounded, stay bounds.

use std::ops::{Add, AddAssign, Mul};

use catalog::Seconds;

/// A time or a duration in picoseconds. The largest number stands for a time that never comes; sums stop there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Picoseconds(pub(crate) u64);

/// Picoseconds in a second.
const PER_SECOND: f64 = 1e12;

impl Picoseconds {
    /// No time.
    pub(crate) const ZERO: Self = Self(0);

    /// The time from `other` until this; 0 if `other` is later.
    pub(crate) fn since(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// A share of the time, rounded up.
    pub(crate) fn share(self, share: f64) -> Self {
        Self(rounded_up(self.0 as f64 * share))
    }
}

impl From<Seconds> for Picoseconds {
    /// Rounds up. Times that are not finite, or longer than 200 days, become the largest.
    fn from(time: Seconds) -> Self {
        if time.0.is_nan() {
            return Self(u64::MAX);
        }
        Self(rounded_up(time.0 * PER_SECOND))
    }
}

/// Rounds up. On the baseline processor that builds target, `f64::ceil` would be a function call.
fn rounded_up(value: f64) -> u64 {
    let whole = value as u64;
    whole.saturating_add(u64::from((whole as f64) < value))
}

impl From<Picoseconds> for Seconds {
    fn from(time: Picoseconds) -> Self {
        match time.0 {
            u64::MAX => Self(f64::INFINITY),
            picoseconds => Self(picoseconds as f64 / PER_SECOND),
        }
    }
}

impl Add for Picoseconds {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Picoseconds {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<u64> for Picoseconds {
    type Output = Self;
    fn mul(self, times: u64) -> Self {
        Self(self.0.saturating_mul(times))
    }
}
