//! The stable JSON forms of strategies, predictions and search results.

use catalog::{
    AxisOrder, CpKind, CudaGraphs, Dispatcher, Fp8Recipe, GradientTypes, Offload, OptimizerStates,
    Overlap, Precision, Runtime, ScheduleKind, Zero,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::decisions::Decisions;
use crate::grammar::{recompute_name, written};
use crate::partition::StagePartition;
use crate::prediction::{
    Breakdown, Candidate, Fit, MemoryItem, NamedTime, Prediction, UsedConstant,
};

/// A strategy, with the precision it was planned for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the names are those of `Decisions`")]
pub struct StrategyJson {
    #[schemars(range(min = 1, max = 16_777_216))]
    pub tp: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub pp: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vpp: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub cp: u64,
    pub cp_kind: CpKind,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub ep: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub etp: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub dp_shard: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub dp_replicate: u64,
    pub zero: Zero,
    pub reshard_after_forward: bool,
    pub sequence_parallel: bool,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub micro_batch: u64,
    #[schemars(range(min = 1, max = 16_777_216))]
    pub num_micro_batches: u64,
    pub recompute: String,
    pub schedule: ScheduleKind,
    pub axis_order: AxisOrder,
    pub stages: StagePartition,
    pub precision: Precision,
    pub overlap: Overlap,
    /// Element types of gradients, written as in `--strategy`; absent if the runtime chooses them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_dtype: Option<String>,
    /// How optimizer states are stored; absent if the runtime chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optim_states: Option<OptimizerStates>,
    /// States that lie in host memory, written as in `--strategy`; absent if none do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<String>,
    /// How many blocks ahead ZeRO-3 gathers parameters; absent if the runtime chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 8))]
    pub prefetch: Option<u64>,
    /// Layers whose saved activations lie in host memory; absent if there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offload_layers: u64,
    /// How tokens are sent to their experts; absent if the runtime chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatcher: Option<Dispatcher>,
    /// What is captured in CUDA graphs; absent if the runtime chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<CudaGraphs>,
    /// How the operands of 8-bit products are scaled; absent if the runtime chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_recipe: Option<Fp8Recipe>,
}

/// Whether a count is 0; its field is then left out.
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl StrategyJson {
    /// The JSON form of decisions for a job whose linear layers compute in `precision`.
    #[must_use]
    pub fn new(d: &Decisions, precision: Precision) -> Self {
        Self {
            tp: d.tp,
            pp: d.pp,
            vpp: d.vpp,
            cp: d.cp,
            cp_kind: d.cp_kind,
            ep: d.ep,
            etp: d.etp,
            dp_shard: d.dp_shard,
            dp_replicate: d.dp_replicate,
            zero: d.zero,
            reshard_after_forward: d.reshard_after_forward,
            sequence_parallel: d.sequence_parallel,
            micro_batch: d.micro_batch,
            num_micro_batches: d.num_micro_batches,
            recompute: recompute_name(d.recompute),
            schedule: d.schedule,
            axis_order: d.axis_order,
            stages: d.stages.clone(),
            precision,
            overlap: d.overlap,
            grad_dtype: d.gradients.map(GradientTypes::name),
            optim_states: d.optimizer_states,
            offload: d.offload.map(Offload::name),
            prefetch: d.prefetch,
            offload_layers: d.offload_layers,
            dispatcher: d.dispatcher,
            graphs: d.graphs,
            fp8_recipe: d.fp8_recipe,
        }
    }
}

/// A prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictedJson {
    /// Seconds per optimizer step.
    pub step_time_s: f64,
    /// 80% interval of the step time, in seconds.
    pub step_time_interval_s: [f64; 2],
    /// Tokens per second and device.
    pub tokens_per_s_per_gpu: f64,
    /// Model FLOPs utilisation over the dense peak, causal attention counted once.
    pub mfu: f64,
    /// MFU by the PaLM convention (attention as if nothing were masked). Files of version 0.1 have
    /// it as `mfu` and do not have this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu_palm: Option<f64>,
    /// That peak, FLOP/s per rank: of its device, or of its share of the cores where ranks share them.
    pub peak_flops_per_s: f64,
    /// Peak memory of the heaviest rank.
    pub peak_memory_bytes: u64,
    /// 80% interval of the peak memory.
    pub peak_memory_interval_bytes: [u64; 2],
    /// Pipeline rank of the heaviest rank.
    pub peak_rank: u32,
    /// What runs at the peak, such as `F s0 m3`.
    pub peak_moment: String,
    /// Peak memory per pipeline rank.
    pub memory_by_rank_bytes: Vec<u64>,
    /// Memory per pipeline rank that a plan may use, if it is not the same on all GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub usable_by_rank_bytes: Vec<u64>,
    /// Whether the plan fits in memory.
    pub fits: bool,
    /// Probability that the plan fits. Files of version 0.1 have neither this nor `evidence`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p_fits: Option<f64>,
    /// How many published runs support predictions like this one, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// Capacity less headroom less peak; negative when it does not fit.
    pub spare_bytes: i64,
    /// Host memory of a node that states take; absent if no states are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    /// Where the time goes.
    pub breakdown: Breakdown,
}

impl From<&Prediction> for PredictedJson {
    fn from(p: &Prediction) -> Self {
        Self {
            step_time_s: p.step_time.0,
            step_time_interval_s: [p.step_time_interval.0.0, p.step_time_interval.1.0],
            tokens_per_s_per_gpu: p.tokens_per_s_per_gpu,
            mfu: p.mfu,
            mfu_palm: Some(p.mfu_palm),
            peak_flops_per_s: p.peak_flop_rate.0,
            peak_memory_bytes: p.peak_memory.0,
            peak_memory_interval_bytes: [p.peak_memory_interval.0.0, p.peak_memory_interval.1.0],
            peak_rank: p.peak_rank,
            peak_moment: p.peak_moment.clone(),
            memory_by_rank_bytes: p.memory_by_rank.iter().map(|b| b.0).collect(),
            usable_by_rank_bytes: match p.usable_by_rank.iter().all(|b| *b == p.usable()) {
                true => Vec::new(),
                false => p.usable_by_rank.iter().map(|b| b.0).collect(),
            },
            fits: p.fit.fits(),
            p_fits: Some(p.p_fits),
            evidence: Some(p.evidence.clone()),
            spare_bytes: match &p.fit {
                Fit::Fits { spare } => signed(spare.0),
                Fit::TooLarge { over, .. } => -signed(over.0),
            },
            host_memory_bytes: Some(p.host_memory.used.0).filter(|&bytes| bytes > 0),
            breakdown: p.breakdown,
        }
    }
}

/// The number as a signed one, at most `i64::MAX`.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A strategy with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CandidateJson {
    /// The decisions.
    pub strategy: StrategyJson,
    /// The decisions on one line, as `--strategy` takes them.
    pub strategy_text: String,
    /// The strategy in short form.
    pub summary: String,
    /// Predicted time and memory.
    pub predicted: PredictedJson,
    /// Why it is not the best; empty for the best.
    pub why_not_first: String,
}

impl CandidateJson {
    /// The JSON form of a candidate. Linear layers compute in `precision`; the summary leaves out what is the default of
    /// `runtime`.
    #[must_use]
    pub fn new(c: &Candidate, runtime: &Runtime, precision: Precision) -> Self {
        Self {
            strategy: StrategyJson::new(c.strategy.decisions(), precision),
            strategy_text: c.strategy.to_string(),
            summary: written(&c.strategy, runtime),
            predicted: PredictedJson::from(&c.prediction),
            why_not_first: c.why_not_first.clone(),
        }
    }
}

/// The named parts of a prediction.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct DetailJson {
    /// Parts of the heaviest rank's peak.
    pub memory: Vec<MemoryItem>,
    /// Kernels and collectives of the busiest rank, with their time per step; a message has the time by which it delays kernels.
    pub kernels: Vec<NamedTime>,
    /// Constants used.
    pub provenance: Vec<UsedConstant>,
}

impl From<&Prediction> for DetailJson {
    fn from(p: &Prediction) -> Self {
        Self {
            memory: p.memory.clone(),
            kernels: p.kernels.clone(),
            provenance: p.provenance.clone(),
        }
    }
}
