//! Why there is no search result.

use costmodel::CostError;

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
