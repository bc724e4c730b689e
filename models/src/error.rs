//! Errors of tracing a model under a layout.

use dtensor::DTensorError;

/// Why a model cannot run under a layout.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// An operator has no rule for its inputs' placements.
    #[error(transparent)]
    Placement(#[from] DTensorError),
    /// A plan's pattern is not a regular expression.
    #[error("sharding plan pattern {pattern}: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
}
