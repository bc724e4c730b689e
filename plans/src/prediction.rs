//! Predictions of the cost model, and results of a search.

use std::collections::BTreeMap;

use catalog::{Bytes, Origin, Seconds};
use serde::{Deserialize, Serialize};

use crate::strategy::Strategy;

/// Predicted time and memory of one training step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Time of one optimizer step.
    pub step_time: Seconds,
    /// Step time interval that holds the measured value with probability 0.8.
    pub step_time_interval: (Seconds, Seconds),
    /// Half-width of the 80% interval of `ln` of the ratio of two plans' step times: closer plans
    /// differ within the error of such comparisons.
    pub ratio_error: f64,
    /// Tokens per second and device, padding not counted.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilisation over the dense peak. Causal attention counts once: a query has the keys
    /// that it may see.
    pub mfu: f64,
    /// MFU by the PaLM convention, which counts attention as if nothing were masked. torchtitan and nanotron log it; present
    /// Megatron-LM and Megatron Bridge count half of that for causal attention, as `mfu` does.
    pub mfu_palm: f64,
    /// The dense peak of one rank that both are relative to: that of its device, or of its share of the cores where ranks share
    /// them.
    pub peak_flop_rate: catalog::FlopRate,
    /// Memory of the heaviest rank at its peak.
    pub peak_memory: Bytes,
    /// Peak memory interval that holds the measured value with probability 0.8.
    pub peak_memory_interval: (Bytes, Bytes),
    /// Probability that what the plan needs is within capacity less headroom. What the allocator caches is not needed, but counts
    /// in `peak_memory` and `fit`. So a plan that does not fit by `fit` may still have a high probability.
    pub p_fits: f64,
    /// How many published runs support predictions like this one, in words.
    pub evidence: String,
    /// Pipeline rank whose peak takes the largest share of its memory.
    pub peak_rank: u32,
    /// What runs on that rank at its peak, such as `F s0 m3`.
    pub peak_moment: String,
    /// Peak memory of every pipeline rank.
    pub memory_by_rank: Vec<Bytes>,
    /// Memory of a GPU of every pipeline rank that a plan may use: its capacity less headroom.
    pub usable_by_rank: Vec<Bytes>,
    /// The named parts of the heaviest rank's peak, largest first; they sum to `peak_memory`.
    pub memory: Vec<MemoryItem>,
    /// Where the step time of the slowest rank goes; the parts sum to `step_time`.
    pub breakdown: Breakdown,
    /// Kernels and collectives by name: time per step on the busiest rank, largest first. A message has the time by which it
    /// delays kernels; those between pipeline stages and of data parallelism are not listed.
    pub kernels: Vec<NamedTime>,
    /// Memory of a node's host, and how much of it offloaded states take.
    pub host_memory: HostMemory,
    /// Whether it fits, and if not by how much.
    pub fit: Fit,
    /// The constants that the prediction rests on, with their evidence.
    pub provenance: Vec<UsedConstant>,
}

/// Above this risk a plan may be chosen that fits only if the allocator caches less.
pub const EVEN: f64 = 0.5;

/// Whether a plan may be chosen at this risk, given its probability to fit and whether its peak is within capacity. The peak
/// counts what the allocator caches; a plan can run without, but its steps take longer. So above a risk of [`EVEN`] only the
/// probability decides.
#[must_use]
pub fn may_choose(p_fits: f64, fits: bool, risk: f64) -> bool {
    p_fits >= 1.0 - risk && (fits || risk > EVEN)
}

impl Prediction {
    /// Whether the plan may be chosen at this risk.
    #[must_use]
    pub fn may_choose(&self, risk: f64) -> bool {
        may_choose(self.p_fits, self.fit.fits(), risk)
    }

    /// Memory of a GPU of the heaviest rank that a plan may use.
    #[must_use]
    pub fn usable(&self) -> Bytes {
        self.usable_by_rank[self.peak_rank as usize]
    }

    /// Bytes of those parts of the heaviest rank's peak whose names begin with these words, such as `optimizer`.
    #[must_use]
    pub fn memory_of(&self, name: &str) -> Bytes {
        let parts = self
            .memory
            .iter()
            .filter(|part| part.name.starts_with(name));
        Bytes(parts.map(|part| part.bytes).sum())
    }

    /// The MFU by the PaLM convention if it differs by 1% or more from the one that counts only visible keys: what to
    /// print beside it.
    #[must_use]
    pub fn mfu_palm_beside(&self) -> Option<f64> {
        let differs = (self.mfu_palm - self.mfu).abs() >= 0.01 * self.mfu;
        differs.then_some(self.mfu_palm)
    }
}

/// Memory of the host of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes that the states of all the node's ranks take.
    pub used: Bytes,
    /// Size of the host's memory; `None` if it is not known.
    pub there: Option<Bytes>,
}

impl HostMemory {
    /// Whether there is enough, as far as is known.
    #[must_use]
    pub fn fits(self) -> bool {
        self.there.is_none_or(|there| self.used <= there)
    }
}

/// A named part of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryItem {
    /// What it is, such as `parameters`, `saved activations: self_attn.q_proj input`.
    pub name: String,
    /// Size on this rank.
    pub bytes: u64,
    /// Pipeline rank.
    pub rank: u32,
    /// When, such as `whole step` or `F s0 m3`.
    pub moment: String,
}

/// How long something takes, such as a kernel, with its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedTime {
    /// Operator or collective.
    pub name: String,
    /// Time in seconds: per step in a prediction, per pass of a block in a `BlockDetail`.
    pub seconds: f64,
}

/// Parts of the step time of the critical rank. They sum to the step time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Breakdown {
    /// Forward and backward kernels.
    pub compute_s: f64,
    /// Kernels run again in backward.
    pub recompute_s: f64,
    /// Tensor- and sequence-parallel collectives that nothing hides.
    pub tp_exposed_s: f64,
    /// Context-parallel communication that nothing hides.
    pub cp_exposed_s: f64,
    /// Messages to experts and back that nothing hides.
    pub ep_exposed_s: f64,
    /// Gradient reduction and parameter gathering that nothing hides.
    pub dp_exposed_s: f64,
    /// Waiting for pipeline transfers.
    pub pp_exposed_s: f64,
    /// Idle for want of work: warm-up, drain and imbalance.
    pub bubble_s: f64,
    /// Gradient norm, clipping, optimizer.
    pub optimizer_s: f64,
    /// Copies to and from host memory, and the update of weights by the host, that nothing hides.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offload_exposed_s: f64,
    /// The device waits for the host to issue.
    pub host_s: f64,
    /// Waiting for micro-batches and replicas whose sequences hold longer documents; absent where none do.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub imbalance_s: f64,
    /// Waiting for ranks that happen to be slow; absent where the cluster has no jitter.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stragglers_s: f64,
    /// Adding up gradients over groups of replicas on different pools, which nothing hides; absent where there is one group.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub pools_exposed_s: f64,
}

/// Whether a part takes no time.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_zero(time: &f64) -> bool {
    *time == 0.0
}

impl Breakdown {
    fn parts(&mut self) -> [&mut f64; 14] {
        [
            &mut self.compute_s,
            &mut self.recompute_s,
            &mut self.tp_exposed_s,
            &mut self.cp_exposed_s,
            &mut self.ep_exposed_s,
            &mut self.dp_exposed_s,
            &mut self.pp_exposed_s,
            &mut self.bubble_s,
            &mut self.optimizer_s,
            &mut self.offload_exposed_s,
            &mut self.host_s,
            &mut self.imbalance_s,
            &mut self.stragglers_s,
            &mut self.pools_exposed_s,
        ]
    }

    /// Multiplies every part by a factor.
    pub fn scale(&mut self, factor: f64) {
        for part in self.parts() {
            *part *= factor;
        }
    }

    /// The sum of all parts.
    #[must_use]
    pub fn total(mut self) -> f64 {
        self.parts().into_iter().map(|part| *part).sum()
    }
}

/// Whether a strategy fits in device memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// The peak is within capacity less headroom.
    Fits {
        /// Bytes left: capacity less headroom less peak.
        spare: Bytes,
    },
    /// The peak is above capacity less headroom.
    TooLarge {
        /// Bytes missing: peak less (capacity less headroom).
        over: Bytes,
        /// Name of the largest part of the peak memory.
        largest: String,
    },
}

/// A constant that entered a prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UsedConstant {
    /// What it is.
    pub name: String,
    /// Value with unit.
    pub value: String,
    /// Evidence.
    pub origin: Origin,
    /// Where it is from.
    pub source: String,
}

/// Lower bounds that are known before simulation. Never above the simulated value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floors {
    /// Step time: no order of the same work is faster.
    pub time: Seconds,
    /// Peak memory of the heaviest rank: its fullest moment needs at least this.
    pub memory: Bytes,
    /// Whether what is offloaded may fit in host memory.
    pub fits_host: bool,
}

impl Floors {
    /// Whether a strategy with these lower bounds may fit: its peak in `limit` bytes of a device, and what it offloads in host memory.
    #[must_use]
    pub fn may_fit(&self, limit: Bytes) -> bool {
        self.memory <= limit && self.fits_host
    }
}

/// A strategy with its prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// Predicted time and memory.
    pub prediction: Prediction,
    /// Why it is not the best: the term that grows most against the first. Empty for the first.
    pub why_not_first: String,
}

impl Candidate {
    /// A strategy that is compared with no other.
    #[must_use]
    pub fn alone(strategy: Strategy, prediction: Prediction) -> Self {
        Self {
            strategy,
            prediction,
            why_not_first: String::new(),
        }
    }
}

/// What to relax when nothing fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relaxation {
    /// The advice, as a sentence without its full stop.
    pub says: String,
    /// The flag (without dashes) and value with which a plan was found; `None` for other advice.
    pub instead: Option<(&'static str, String)>,
}

impl Relaxation {
    /// Advice that is not the value of a single flag.
    #[must_use]
    pub fn advice(says: impl Into<String>) -> Self {
        Self {
            says: says.into(),
            instead: None,
        }
    }
}

/// Merges entries that hold the same plan: each plan is listed once, with all the measures by which it is best, separated
/// by semicolons.
#[must_use]
pub fn by_plan(wishes: &[(String, Candidate)]) -> Vec<(String, &Candidate)> {
    let mut plans: Vec<(String, &Candidate)> = Vec::new();
    for (wish, plan) in wishes {
        match plans.iter_mut().find(|(_, p)| p.strategy == plan.strategy) {
            Some((known, _)) => *known = format!("{known}; {wish}"),
            None => plans.push((wish.clone(), plan)),
        }
    }
    plans
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchOutcome {
    /// Best first; empty when nothing fits.
    pub top: Vec<Candidate>,
    /// Plans that are best by another measure than step time, each with that measure in words, such as `least memory`.
    pub wishes: Vec<(String, Candidate)>,
    /// How many strategies of the space were simulated or pruned.
    pub space: SpaceReport,
    /// What to relax when nothing fits.
    pub relax: Vec<Relaxation>,
    /// Whether the search was stopped before it covered the whole space.
    pub interrupted: bool,
}

/// How many strategies of the space were simulated, and how many left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpaceReport {
    /// Legal strategies in the stated space.
    pub strategies: u64,
    /// Full engine simulations run.
    pub simulated: u64,
    /// Of those, the ones that do not fit.
    pub too_large: u64,
    /// Strategies removed by a proven bound, by reason.
    pub pruned: BTreeMap<String, u64>,
    /// Combinations of sizes that are not in the space, by the rule that excludes them.
    pub illegal: BTreeMap<String, u64>,
}

impl Fit {
    /// Whether the strategy fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        matches!(self, Fit::Fits { .. })
    }
}
