//! Compares the strategy that a team trains with now with the best plan: what single changes would gain, and which
//! changes lead to the best plan.

use catalog::{Bytes, Seconds, elementary};

use crate::decisions::Decisions;
use crate::prediction::Candidate;
use crate::strategy::Strategy;

/// A change of one decision of a strategy, and of what must change with it.
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
    /// Whether training gives other results than with the unchanged strategy.
    pub changes_results: bool,
}

/// The strategy that a team trains with now, and how to change it.
#[derive(Clone, Debug, PartialEq)]
pub struct Present {
    /// The strategy and its prediction.
    pub candidate: Candidate,
    /// Whether it fits with the probability that was asked for.
    pub fits: bool,
    /// The error of comparing two plans: half-width of the 80% interval of `ln` of the ratio of their step times.
    pub error: f64,
    /// Every change of one decision. Those that fit come first; each group is sorted with the fastest first.
    pub changes: Vec<Change>,
    /// Successive changes that lead to the best plan, each from the strategy before it; empty if there is no best plan,
    /// or the present strategy is it, or no changes of single decisions lead there.
    pub path: Vec<Change>,
    /// Where it runs on a cluster of several pools; `None` if all nodes are alike.
    pub on_pools: Option<OnPools>,
}

/// Where a strategy in use, and the best plan, run on a cluster of several pools.
#[derive(Clone, Debug, PartialEq)]
pub struct OnPools {
    /// Its devices, such as `64 × A100-80GB`; those of groups of replicas are separated by ` | `.
    pub devices: String,
    /// Its groups of replicas in words; empty if all replicas are alike.
    pub groups: Vec<String>,
    /// The devices of the best plan if single changes cannot lead to it, because it runs on others
    /// or because it or the present strategy has groups of replicas.
    pub best_elsewhere: Option<String>,
}

impl Present {
    /// The devices of the best plan, if single changes cannot lead to it.
    #[must_use]
    pub fn best_elsewhere(&self) -> Option<&str> {
        self.on_pools.as_ref()?.best_elsewhere.as_deref()
    }

    /// Its groups of replicas in words; empty if all replicas are alike.
    #[must_use]
    pub fn groups(&self) -> &[String] {
        self.on_pools.as_ref().map_or(&[], |on| &on.groups)
    }

    /// How much less time a step takes than now; negative if it takes more.
    #[must_use]
    pub fn gain(&self, step_time: Seconds) -> Seconds {
        Seconds(self.candidate.prediction.step_time.0 - step_time.0)
    }

    /// [`Self::gain`] as a share of the present step time.
    #[must_use]
    pub fn share(&self, step_time: Seconds) -> f64 {
        self.gain(step_time).0 / self.candidate.prediction.step_time.0
    }

    /// Whether a step time differs from the present one by no more than the error of such comparisons.
    #[must_use]
    pub fn within_error(&self, step_time: Seconds) -> bool {
        let ratio = step_time.0 / self.candidate.prediction.step_time.0;
        elementary::ln(ratio).abs() <= self.error
    }

    /// The best single change: the fastest that fits. `None` if nothing fits, or if the present strategy fits and is at
    /// least as fast.
    #[must_use]
    pub fn best_change(&self) -> Option<&Change> {
        let first = self.changes.first().filter(|change| change.fits)?;
        (!self.fits || self.gain(first.step_time).0 > 0.0).then_some(first)
    }

    /// For every decision its best change, in the order of `changes`.
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

/// Whether two strategies of one runtime have the same types of gradients and moments. Other types
/// change training results by more than the order of sums does.
#[must_use]
pub fn same_results(a: &Decisions, b: &Decisions) -> bool {
    let other = |d: &Decisions| d.optimizer_states.filter(|states| states.changes_results());
    a.gradients == b.gradients && other(a) == other(b)
}
