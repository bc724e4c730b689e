//! What can go wrong when a model runs under a plan.

use crate::placement::{Placement, Placements};
use catalog::Axis;

/// An operator met placements it has no rule for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DTensorError {
    /// An operator has no propagation rule for its inputs' placements.
    #[error("operator {operator} in {scope} has no rule for placements {placements:?}")]
    NoRule {
        /// Name of the operator.
        operator: &'static str,
        /// Dotted path of the module.
        scope: String,
        /// Placements of its inputs.
        placements: Vec<Placements>,
    },
    /// A redistribution that is not one of S→R, P→R, P→S, S→S′, R→S.
    #[error("{name} cannot go from {from:?} to {to:?} on axis {axis:?}")]
    NoRedistribution {
        /// Name of the plan entry that asks for it.
        name: String,
        /// The mesh axis.
        axis: Axis,
        /// The tensor's placement now.
        from: Placement,
        /// The placement asked for.
        to: Placement,
    },
}
