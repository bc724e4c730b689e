//! Errors of a search.

use catalog::Mistake;
use costmodel::CostError;

/// Why a search has no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlannerError {
    /// A strategy could not be priced.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// The number of devices is out of range.
    #[error(transparent)]
    Workload(#[from] catalog::WorkloadError),
    /// A constraint does not make sense.
    #[error("{0}")]
    Constraint(Mistake),
    /// An exhaustive search would have to simulate too many strategies.
    #[error(
        "--exhaustive simulates every strategy, and this space holds {strategies}; the limit is \
         {limit}. Fix or bound a dimension, or drop --exhaustive: the pruned search gives the same best"
    )]
    TooLarge {
        /// Number of strategies in the space.
        strategies: u64,
        /// Largest number of strategies that is simulated.
        limit: u64,
    },
}
