//! What a prediction assumed of kernels, and what the launched system does instead.

use catalog::runtime::Rewrite;

/// An assumption of the prediction that the target does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// The rewrite of the operator graph in which they differ.
    pub rewrite: Rewrite,
    /// Whether the target performs it, though the prediction assumed that it does not; otherwise the contrary.
    pub performed: bool,
    /// Why.
    pub why: String,
}
