//! Which plan: the finite space of strategies, the exact pruned search over it, and explanations.
//! No formula lives here; costs and bounds come from `costmodel`.

pub mod constraints;
pub mod explain;
pub mod legal_values;
pub mod search;
pub mod size;
pub mod space;

use costmodel::CostError;

pub use constraints::Constraints;
pub use search::{Objective, SearchOptions, search};
pub use space::SearchSpace;

/// Why there is no search result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlannerError {
    /// A strategy could not be priced.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// A number of devices is out of range.
    #[error(transparent)]
    Workload(#[from] catalog::WorkloadError),
    /// A constraint does not make sense.
    #[error("constraint `{text}`: {reason}")]
    Constraint {
        /// As written.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// Too many strategies to simulate all.
    #[error(
        "--exhaustive simulates every strategy, and this space holds {strategies}; the limit is \
         {limit}. Fix or bound a dimension, or drop --exhaustive: the pruned search gives the same best"
    )]
    TooLarge {
        /// In the space.
        strategies: u64,
        /// Most that are simulated.
        limit: u64,
    },
}
