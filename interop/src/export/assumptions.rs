//! Assumptions of a prediction that an export target does not meet.

use catalog::runtime::Rewrite;
use catalog::{GradientTypes, Overlap};

/// An assumption of the prediction that the target does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// What prediction and target do differently.
    pub differs: Differs,
    /// Why they differ, for the user.
    pub why: String,
}

/// What a prediction assumes and a target does otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Differs {
    /// The target performs this rewrite of the operator graph. The prediction assumed that it does not.
    Performed(Rewrite),
    /// The prediction assumed this rewrite of the operator graph. The target does not perform it.
    NotPerformed(Rewrite),
    /// The prediction assumed gradients of other types than the target has.
    Gradients {
        /// The types that the prediction assumed.
        assumed: GradientTypes,
        /// The types that the target has.
        has: GradientTypes,
    },
    /// The prediction assumed that other messages overlap than do under the target.
    Overlap {
        /// The overlaps that the prediction assumed.
        assumed: Overlap,
        /// The overlaps of the target.
        has: Overlap,
    },
}
