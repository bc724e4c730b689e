//! The strategy that a team trains with now, against the best plan: what single changes would gain, and which of them
//! lead to the best plan.

use catalog::{Bytes, OptimizerStates, Seconds, elementary};

use crate::decisions::Decisions;
use crate::prediction::Candidate;
use crate::strategy::Strategy;

/// A strategy that differs from another in one decision, and in what has to follow from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The decision, such as `tp`; for ranks moved between two axes, both.
    pub decision: &'static str,
    /// What changes, in the notation of strategies: `tp8 dp2 → tp4 dp4`.
    pub words: String,
    /// The strategy after the change.
    pub strategy: Strategy,
    /// Time of one optimizer step after the change.
    pub step_time: Seconds,
    /// Memory of the heaviest rank at its peak, after the change.
    pub peak_memory: Bytes,
    /// Probability that this peak fits.
    pub p_fits: f64,
    /// Whether it fits with the probability that was asked for.
    pub fits: bool,
    /// Whether it computes other numbers than the strategy that is changed.
    pub changes_results: bool,
}

/// A strategy in use, with the ways from it to the best plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Present {
    /// The strategy and its prediction.
    pub candidate: Candidate,
    /// Whether it fits with the probability that was asked for.
    pub fits: bool,
    /// The error of comparing two plans: step times whose ratio has a smaller logarithm are a tie.
    pub error: f64,
    /// All strategies one decision away: those that fit first, each group best first.
    pub changes: Vec<Change>,
    /// Successive changes that lead to the best plan, each from the strategy before it; empty if there is no best plan,
    /// or the present strategy is it.
    pub path: Vec<Change>,
}

impl Present {
    /// Time that a step takes less than now.
    #[must_use]
    pub fn gain(&self, step_time: Seconds) -> Seconds {
        Seconds(self.candidate.prediction.step_time.0 - step_time.0)
    }

    /// The same as a share of the present step time.
    #[must_use]
    pub fn share(&self, step_time: Seconds) -> f64 {
        self.gain(step_time).0 / self.candidate.prediction.step_time.0
    }

    /// Whether a step time differs from the present one by no more than the error of such comparisons.
    #[must_use]
    pub fn ties(&self, step_time: Seconds) -> bool {
        let ratio = step_time.0 / self.candidate.prediction.step_time.0;
        elementary::ln(ratio).abs() <= self.error
    }

    /// The change that helps most: it fits, and is faster than the present strategy or that does not fit.
    #[must_use]
    pub fn best_change(&self) -> Option<&Change> {
        let first = self.changes.first().filter(|change| change.fits)?;
        (!self.fits || self.gain(first.step_time).0 > 0.0).then_some(first)
    }

    /// The best change of every decision, in the order of changes.
    #[must_use]
    pub fn by_decision(&self) -> Vec<&Change> {
        let mut best: Vec<&Change> = Vec::new();
        for change in &self.changes {
            if !best.iter().any(|known| known.decision == change.decision) {
                best.push(change);
            }
        }
        best
    }
}

/// Whether strategies of one runtime add up gradients and keep moments in the same types: others change the numbers that a
/// training computes by more than the order of sums.
#[must_use]
pub fn same_results(a: &Decisions, b: &Decisions) -> bool {
    let narrow = |d: &Decisions| match d.optimizer_states {
        Some(OptimizerStates::Bf16Moments) => true,
        Some(OptimizerStates::SplitMaster) | None => false,
    };
    a.gradients == b.gradients && narrow(a) == narrow(b)
}
