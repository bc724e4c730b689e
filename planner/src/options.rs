//! Options of a search.

use std::cmp::Ordering;
use std::sync::atomic::{self, AtomicBool};

use catalog::{Bytes, Seconds};
use costmodel::CostModel;

/// Default of the largest probability that a plan does not fit: with 90% probability, the memory
/// that it needs is within the device's.
pub const RISK: f64 = 0.1;

/// Step of advised risks.
pub(crate) const RISK_STEP: f64 = 0.01;

/// The objective of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// Minimise step time.
    #[default]
    Time,
    /// Minimise peak memory.
    Memory,
}

impl Objective {
    /// What is minimised, of this time and this memory.
    pub(crate) fn of(self, time: Seconds, memory: Bytes) -> f64 {
        match self {
            Self::Time => time.0,
            Self::Memory => memory.as_f64(),
        }
    }

    /// The order of two plans' times and memory: by what is minimised, then by the other.
    pub(crate) fn order(self, a: (Seconds, Bytes), b: (Seconds, Bytes)) -> Ordering {
        let (time, memory) = (a.0.0.total_cmp(&b.0.0), a.1.cmp(&b.1));
        match self {
            Self::Time => time.then(memory),
            Self::Memory => memory.then(time),
        }
    }
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
    /// Largest share of a GPU's usable memory that a plan's fullest rank may take, if that is less than the risk allows.
    pub fullest: Option<f64>,
    /// When set from outside, the search stops and returns the best found so far.
    pub cancelled: Option<&'a AtomicBool>,
}

impl SearchOptions<'_> {
    /// Whether the search was stopped from outside.
    #[must_use]
    pub fn stopped(&self) -> bool {
        (self.cancelled).is_some_and(|flag| flag.load(atomic::Ordering::Relaxed))
    }
}

impl Default for SearchOptions<'_> {
    fn default() -> Self {
        Self {
            objective: Objective::Time,
            top: 10,
            tie: None,
            exhaustive: false,
            risk: Some(RISK),
            fullest: None,
            cancelled: None,
        }
    }
}

/// Largest predicted peak memory that a plan may have.
pub(crate) fn limit(costs: &CostModel, options: &SearchOptions<'_>) -> Bytes {
    let all = Bytes(u64::MAX);
    let by_risk = (options.risk).map_or(all, |risk| costs.scenario().limit(risk));
    let by_share = (options.fullest).map_or(all, |share| bytes_of(share, costs.capacity()));
    by_risk.min(by_share)
}

/// The least risk, in whole percent, at which a plan with this probability to fit is chosen.
pub(crate) fn risk_to_take(p_fits: f64) -> f64 {
    ((1.0 - p_fits) / RISK_STEP).ceil() * RISK_STEP
}

/// `bytes` as a share of `memory`.
pub(crate) fn share_of(bytes: Bytes, memory: Bytes) -> f64 {
    bytes.as_f64() / memory.as_f64()
}

/// The most bytes that are no more than this share of a memory.
pub(crate) fn bytes_of(share: f64, memory: Bytes) -> Bytes {
    let nearest = Bytes((share * memory.as_f64()).round() as u64);
    match share_of(nearest, memory) > share {
        true => nearest.saturating_sub(Bytes(1)),
        false => nearest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_memory_are_whole_bytes() {
        let memory = Bytes(81_604_378_624);
        for bytes in (0..1000).map(|n| Bytes(n * 81_604_377 + n)) {
            let share = share_of(bytes, memory);
            assert_eq!(bytes_of(share, memory), bytes);
            assert_eq!(bytes_of(share.next_up(), memory), bytes);
        }
        assert_eq!(bytes_of(f64::INFINITY, memory), Bytes(u64::MAX));
    }
}
