//! Assumptions of a prediction that an export target does not meet.

use catalog::runtime::Rewrite;

/// An assumption of the prediction that the target does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// The rewrite of the operator graph in which prediction and target differ.
    pub rewrite: Rewrite,
    /// True if the target performs the rewrite although the prediction assumed that it does not; false for the reverse.
    pub performed: bool,
    /// Why they differ, for the user.
    pub why: String,
}
