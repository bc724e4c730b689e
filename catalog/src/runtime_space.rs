//! The strategies that a training system can run, as data.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cuda_graphs::GraphOption;
use crate::dispatcher::Dispatcher;
use crate::dtype::Precision;
use crate::fp8_recipe::Fp8Recipe;
use crate::offload::OffloadOption;
use crate::parallelism::{AxisOrder, CpKind, ScheduleKind, Zero};
use crate::prediction_modules::PredictionModules;
use crate::prefetch::PrefetchOption;
use crate::selection::Selection;
use crate::state_types::{GradientOption, OptimizerStates};

/// The strategies a runtime can express: the search space is bounded by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeSpace {
    /// Precisions that it trains in.
    pub precisions: Vec<Precision>,
    /// Pipeline schedules; empty if it has no pipeline parallelism.
    pub schedules: Vec<ScheduleKind>,
    /// Kinds of context parallelism; empty if it has none.
    pub cp_kinds: Vec<CpKind>,
    /// ZeRO levels.
    pub zero: Vec<Zero>,
    /// Those of the ZeRO levels that jobs with pipeline parallelism may have.
    pub pipeline_zero: Vec<Zero>,
    /// Jobs whose gradients are reduced after the last backward pass, whatever [`crate::Overlap::grad_reduce`] says.
    pub reduces_last: ReducesLast,
    /// Pipeline schedules that do not run with few micro-batches.
    pub filled_schedules: Vec<FilledSchedule>,
    /// Pipeline schedules under which a rank waits for its messages to other stages, whatever [`crate::Overlap::pipeline`] says.
    pub blocking_schedules: Vec<ScheduleKind>,
    /// Whether a rank under such a schedule first sends to another stage and then receives, rather than both at once.
    pub one_message_at_a_time: bool,
    /// Kinds of context parallelism under which attention can have sinks (extra learned terms in its softmax, as in gpt-oss).
    pub sink_cp_kinds: Vec<CpKind>,
    /// Kinds of context parallelism under which attention can be limited to a sliding window.
    pub window_cp_kinds: Vec<CpKind>,
    /// What it does with a model's prediction modules.
    pub prediction_modules: PredictionModules,
    /// Mesh axis orders.
    pub axis_orders: Vec<AxisOrder>,
    /// Whether pipeline parallelism must be the last axis unless experts have as many data-parallel
    /// ranks as the rest of the model.
    pub inner_pipeline_needs_equal_dp: bool,
    /// Recompute modes.
    pub recompute: Vec<RecomputeMode>,
    /// Other sets of parts that it can be told to recompute, instead of `selective`.
    pub selections: Vec<Selection>,
    /// Whether tensor parallelism is possible.
    pub tensor_parallel: bool,
    /// Whether tensor parallelism comes with sequence parallelism.
    pub sequence_parallel: SequenceParallelUse,
    /// Whether expert parallelism is possible.
    pub expert_parallel: bool,
    /// Over how many ranks one expert may be split.
    pub expert_split: ExpertSplit,
    /// Whether data parallelism may shard within groups and replicate across them.
    pub hybrid_shard: bool,
    /// Whether stages may have unequal numbers of layers.
    pub uneven_stages: bool,
    /// Whether pipelines may divide models whose embeddings are tied to the head.
    pub tied_in_pipelines: bool,
    /// Whether tensor parallelism is limited to divisors of the key/value heads.
    pub kv_heads_limit_tp: bool,
    /// Under ZeRO-3, whether parameters may stay gathered between forward and backward.
    pub keep_after_forward: bool,
    /// Element types of gradients that it can be told to use instead of its own.
    pub gradients: Vec<GradientOption>,
    /// Ways to store optimizer states that it can be told to use instead of its own where ZeRO shards them, the largest
    /// first.
    pub optimizer_states: Vec<OptimizerStates>,
    /// States that it can be told to keep in host memory.
    pub offload: Vec<OffloadOption>,
    /// Whether it can keep the saved activations of a number of layers in host memory.
    pub offload_layers: bool,
    /// Numbers of blocks to gather ahead under ZeRO-3 that it offers, beside one.
    pub prefetch: Vec<PrefetchOption>,
    /// ZeRO levels at which the overlap of gradient reduction with backward can be switched off.
    pub exposed_gradients: Vec<Zero>,
    /// ZeRO levels at which the user can switch off the overlap of parameter gathers with passes.
    pub exposed_parameters: Vec<Zero>,
    /// Whether the user can switch the overlap of tensor-parallel messages with matrix products on and off. This needs
    /// sequence parallelism.
    pub tensor_parallel_overlap: bool,
    /// Whether the overlap of messages to and from experts with another micro-batch's passes can be
    /// switched on. It needs alternating micro-batches: an interleaved schedule, or no pipeline.
    pub expert_overlap: bool,
    /// Ways to send tokens to their experts that it can be told to use instead of its own.
    pub dispatchers: Vec<Dispatcher>,
    /// Parts of a step that it can be told to capture in CUDA graphs instead of its own choice.
    pub graphs: Vec<GraphOption>,
    /// Ways to scale the operands of 8-bit products that it can be told to use instead of its own.
    pub fp8_recipes: Vec<Fp8Recipe>,
}

impl RuntimeSpace {
    /// The kind of context parallelism of a strategy that names none; a ring where the runtime has no context parallelism.
    #[must_use]
    pub fn usual_cp_kind(&self) -> CpKind {
        self.cp_kinds.first().copied().unwrap_or(CpKind::Ring)
    }

    /// ZeRO levels of jobs with `pp` pipeline ranks.
    pub fn zero_levels(&self, pp: u64) -> impl Iterator<Item = Zero> {
        let all = self.zero.iter().copied();
        all.filter(move |level| pp == 1 || self.pipeline_zero.contains(level))
    }

    /// The fewest micro-batches with which it runs a schedule on `pp` pipeline ranks.
    #[must_use]
    pub fn fewest_micro_batches(&self, schedule: ScheduleKind, pp: u64) -> u64 {
        let mut filled = self.filled_schedules.iter();
        let found = filled.find(|filled| filled.schedule == schedule);
        found.map_or(1, |filled| pp.saturating_sub(filled.idle_ranks).max(1))
    }
}

/// The jobs in which gradients are reduced after the last backward pass of a step, although the runtime reduces those of other jobs
/// beside backward passes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReducesLast {
    /// Those of these ZeRO levels.
    pub zero: Vec<Zero>,
    /// Those with pipeline parallelism.
    pub pipelines: bool,
}

impl ReducesLast {
    /// Whether a job with this ZeRO level and `pp` pipeline ranks is one of them.
    #[must_use]
    pub fn contains(&self, zero: Zero, pp: u64) -> bool {
        self.zero.contains(&zero) || self.pipelines && pp > 1
    }
}

/// A pipeline schedule that does not run with few micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FilledSchedule {
    /// The schedule.
    pub schedule: ScheduleKind,
    /// How many fewer micro-batches than pipeline ranks there may be.
    pub idle_ranks: u64,
}

/// Over how many tensor-parallel ranks (`etp`) a runtime may split one expert. Where expert parallelism is not used, torchtitan splits
/// experts as it does the other layers, over all tensor-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExpertSplit {
    /// Any number.
    Any,
    /// All tensor-parallel ranks or, with expert parallelism, one.
    AllOrOne,
    /// With expert parallelism one, otherwise all tensor-parallel ranks.
    OneIfSpread,
}

impl ExpertSplit {
    /// The numbers of ranks that it allows beside `ep` expert-parallel ranks, the usual one first; `None` if it allows all.
    #[must_use]
    pub fn sizes(self, ep: u64, tp: u64) -> Option<Vec<u64>> {
        match self {
            Self::Any => None,
            Self::AllOrOne | Self::OneIfSpread if ep == 1 => Some(vec![tp]),
            Self::AllOrOne if tp > 1 => Some(vec![1, tp]),
            Self::AllOrOne | Self::OneIfSpread => Some(vec![1]),
        }
    }

    /// Whether `etp` is one of [`Self::sizes`].
    #[must_use]
    pub fn allows(self, [ep, etp]: [u64; 2], tp: u64) -> bool {
        self.sizes(ep, tp).is_none_or(|sizes| sizes.contains(&etp))
    }

    /// Whether a dispatcher carries tokens to experts that are split over `etp` ranks. torchtitan 0.2 refuses DeepEP there
    /// (pytorch/torchtitan@v0.2.2, models/deepseek_v3/infra/parallelize.py).
    #[must_use]
    pub fn goes_with(self, dispatcher: Dispatcher, etp: u64) -> bool {
        self == Self::Any || etp == 1 || !dispatcher.deduplicates()
    }
}

/// Kinds of recomputation a runtime offers; counts are chosen by the planner.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeMode {
    /// Nothing.
    None,
    /// Parts of every layer: those that the runtime lists as `selective`.
    Selective,
    /// Every layer.
    Full,
    /// A number of layers per virtual stage.
    Layers,
    /// A number of layers per virtual stage, which is smaller on later pipeline ranks.
    Falling,
    /// Operator-level selection (torchtitan).
    SelectiveOps,
}

impl RecomputeMode {
    /// Its name in `--strategy` and plan files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
            Self::Layers => "layers:N",
            Self::Falling => "falling:N",
            Self::SelectiveOps => "selective_ops",
        }
    }
}

/// When tensor parallelism shards the sequence between its blocks.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SequenceParallelUse {
    /// The runtime does not have it.
    Never,
    /// It always comes with tensor parallelism.
    Always,
    /// The user chooses, and hardly anyone does without it: a search has it on unless constraints ask for `sp=off`.
    Usual,
    /// The user chooses: a search tries both.
    Choice,
}
