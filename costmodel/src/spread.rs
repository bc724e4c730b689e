//! How much the time of a micro-batch varies. Attention takes longer on packed sequences with long documents; all other
//! kernels depend on the number of tokens alone.

use catalog::Seconds;
use derive_more::{Add, AddAssign, Mul};

/// How much the time of one or more kernels varies between micro-batches. A micro-batch with long documents is slow in all
/// of them, so the standard deviation of their total is the sum of theirs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Add, AddAssign, Mul)]
pub struct Spread {
    /// Standard deviation of the time of one micro-batch.
    pub deviation: Seconds,
    /// Largest possible excess over the mean: that of a micro-batch whose documents all have the slowest length.
    pub most: Seconds,
}
