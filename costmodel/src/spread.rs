//! How much the time of a micro-batch varies. Attention takes longer on packed sequences with long documents; all other
//! kernels depend on the number of tokens alone.

use catalog::Seconds;
use derive_more::{Add, AddAssign, Mul};

/// How much the time of a kernel, or of a sum of kernels, varies from micro-batch to micro-batch. A micro-batch that is
/// slow in one kernel is slow in all, so the deviations of a sum add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Add, AddAssign, Mul)]
pub struct Spread {
    /// Standard deviation of the time of one micro-batch.
    pub deviation: Seconds,
    /// Largest possible excess over the mean: that of a micro-batch whose documents all have the slowest length.
    pub most: Seconds,
}
