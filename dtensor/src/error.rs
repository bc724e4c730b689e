//! What can go wrong when a model runs under a plan.

use crate::placement::{Placement, Placements};
use catalog::Axis;

/// An operator met placements it has no rule for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DTensorError {
    /// No propagation rule.
    #[error("operator {operator} in {scope} has no rule for placements {placements:?}")]
    NoRule {
        /// Operator.
        operator: &'static str,
        /// Module.
        scope: String,
        /// Placements of its inputs.
        placements: Vec<Placements>,
    },
    /// A redistribution that is not one of S→R, P→R, P→S, S→S′, R→S.
    #[error("{name} cannot go from {from:?} to {to:?} on axis {axis:?}")]
    NoRedistribution {
        /// Plan entry.
        name: String,
        /// Mesh axis.
        axis: Axis,
        /// Current placement.
        from: Placement,
        /// Asked placement.
        to: Placement,
    },
}
