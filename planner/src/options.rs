//! What is asked of a search.

use std::sync::atomic::AtomicBool;

use catalog::Bytes;
use costmodel::CostModel;

/// Largest probability that a plan does not fit, if none is asked for: the 90% bound of its memory lies within the
/// device's.
pub const RISK: f64 = 0.1;

/// What a search minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// Minimise step time.
    #[default]
    Time,
    /// Minimise peak memory.
    Memory,
}

/// Options of a search.
#[derive(Clone, Copy, Debug)]
pub struct SearchOptions<'a> {
    /// What to minimise. On a fixed number of devices, most tokens per dollar means least time.
    pub objective: Objective,
    /// Number of layouts to return, each by one plan.
    pub top: usize,
    /// Largest difference of step times, as a share, at which the simpler of two plans comes first. If `None`, it is the
    /// error of such comparisons, at most 1%.
    pub tie: Option<f64>,
    /// Whether to simulate every strategy, without pruning.
    pub exhaustive: bool,
    /// Largest probability that a plan does not fit, in `(0, 1)`; `None` takes plans of any size.
    pub risk: Option<f64>,
    /// When set from outside, the search stops and returns the best found so far.
    pub cancelled: Option<&'a AtomicBool>,
}

impl Default for SearchOptions<'_> {
    fn default() -> Self {
        Self {
            objective: Objective::Time,
            top: 10,
            tie: None,
            exhaustive: false,
            risk: Some(RISK),
            cancelled: None,
        }
    }
}

/// Largest predicted peak of a plan.
pub(crate) fn limit(costs: &CostModel, options: &SearchOptions<'_>) -> Bytes {
    (options.risk).map_or(Bytes(u64::MAX), |risk| costs.scenario().limit(risk))
}
