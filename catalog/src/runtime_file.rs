//! Runtimes as files: each states what differs from the one it extends.

use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::cuda_graphs::{CudaGraphs, GraphOption};
use crate::dispatcher::{Dispatcher, RoutedTokens, SecondSort};
use crate::dtype::Precision;
use crate::fp8_recipe::Fp8Recipe;
use crate::offload::OffloadOption;
use crate::parallelism::{AxisOrder, CpKind, Overlap, ScheduleKind, Zero};
use crate::prediction_modules::PredictionModules;
use crate::prefetch::{HeldWhole, PrefetchOption};
use crate::provenance::Sourced;
use crate::runtime::{
    AttentionKernel, Overheads, RecomputeMode, Rewrite, Rewrites, Runtime, RuntimeSpace,
    SequenceParallelUse,
};
use crate::runtime_space::{ExpertSplit, FilledSchedule, ReducesLast};
use crate::selection::Selection;
use crate::sharding::{OncePerStep, Unsharded};
use crate::state_types::{GradientOption, OptimizerStates, StateTypes};
use crate::units::{Bytes, Seconds};

/// A runtime as its preset describes it; absent fields are inherited. Presets are built in: no command reads such a file, and
/// `--runtime` takes their names.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuntimeFile {
    /// Version of this format.
    #[schemars(extend("const" = 1))]
    pub schema_version: u32,
    /// Preset name.
    pub name: String,
    /// Other names by which `--runtime` finds it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// The runtime it differs from.
    pub extends: Option<String>,
    /// What it is, with versions.
    pub description: String,
    /// What it can express.
    #[serde(default)]
    #[schemars(transform = without_default)]
    pub space: SpaceFile,
    /// Rewrites it performs beside the inherited ones.
    #[serde(default)]
    pub add_rewrites: Vec<Rewrite>,
    /// Inherited rewrites it does not perform.
    #[serde(default)]
    pub remove_rewrites: Vec<Rewrite>,
    /// The parts that selective recomputation runs again.
    pub selective: Option<Selection>,
    /// Attention kernel.
    pub attention: Option<AttentionKernel>,
    /// State types.
    pub states: Option<StateTypes>,
    /// Gradients of jobs that train in fp16. They belong to `states`: a runtime that states its own does not inherit them.
    pub fp16_gradients: Option<GradientOption>,
    /// Default overlap.
    pub overlap: Option<Overlap>,
    /// What it does once per step, not for every micro-batch, where ZeRO-3 or FSDP holds parameters.
    pub zero3_once: Option<OncePerStep>,
    /// How jobs that shard no states run.
    pub unsharded: Option<Unsharded>,
    /// Whether jobs in 32 bits keep master weights that equal the parameters.
    pub master_in_f32_jobs: Option<bool>,
    /// Whether jobs that shard no parameters run PyTorch's DistributedDataParallel, which copies gradients into buckets.
    pub copies_into_buckets: Option<bool>,
    /// How much of a rank's weights is held whole at one time, if elements decide it, not blocks.
    pub held_whole: Option<HeldWhole>,
    /// How tokens are sent to their experts by default.
    pub dispatcher: Option<Dispatcher>,
    /// When rows are ordered a second time around an all-to-all.
    pub second_sort: Option<SecondSort>,
    /// Which tokens each tensor-parallel rank routes in a layer with experts.
    pub routed_tokens: Option<RoutedTokens>,
    /// What is captured in CUDA graphs by default.
    pub graphs: Option<CudaGraphs>,
    /// How the operands of 8-bit products are scaled by default.
    pub fp8_recipe: Option<Fp8Recipe>,
    /// Costs beside the model.
    #[serde(default)]
    pub overheads: OverheadsFile,
}

/// Takes out that fields are null where they are absent.
fn without_default(schema: &mut Schema) {
    schema.remove("default");
}

/// [`RuntimeSpace`] as written.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpaceFile {
    precisions: Option<Vec<Precision>>,
    schedules: Option<Vec<ScheduleKind>>,
    cp_kinds: Option<Vec<CpKind>>,
    zero: Option<Vec<Zero>>,
    pipeline_zero: Option<Vec<Zero>>,
    reduces_last: Option<ReducesLast>,
    filled_schedules: Option<Vec<FilledSchedule>>,
    blocking_schedules: Option<Vec<ScheduleKind>>,
    one_message_at_a_time: Option<bool>,
    sink_cp_kinds: Option<Vec<CpKind>>,
    window_cp_kinds: Option<Vec<CpKind>>,
    prediction_modules: Option<PredictionModules>,
    axis_orders: Option<Vec<AxisOrder>>,
    inner_pipeline_needs_equal_dp: Option<bool>,
    recompute: Option<Vec<RecomputeMode>>,
    selections: Option<Vec<Selection>>,
    tensor_parallel: Option<bool>,
    sequence_parallel: Option<SequenceParallelUse>,
    expert_parallel: Option<bool>,
    expert_split: Option<ExpertSplit>,
    hybrid_shard: Option<bool>,
    uneven_stages: Option<bool>,
    tied_in_pipelines: Option<bool>,
    kv_heads_limit_tp: Option<bool>,
    keep_after_forward: Option<bool>,
    gradients: Option<Vec<GradientOption>>,
    optimizer_states: Option<Vec<OptimizerStates>>,
    offload: Option<Vec<OffloadOption>>,
    offload_layers: Option<bool>,
    prefetch: Option<Vec<PrefetchOption>>,
    exposed_gradients: Option<Vec<Zero>>,
    exposed_parameters: Option<Vec<Zero>>,
    tensor_parallel_overlap: Option<bool>,
    expert_overlap: Option<bool>,
    dispatchers: Option<Vec<Dispatcher>>,
    graphs: Option<Vec<GraphOption>>,
    fp8_recipes: Option<Vec<Fp8Recipe>>,
}

/// [`Overheads`] as written; the unit is in the name.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverheadsFile {
    launch_us: Option<Sourced<f64>>,
    step_ms: Option<Sourced<f64>>,
    gradient_byte_ns: Option<Sourced<f64>>,
    optimizer_bytes: Option<Sourced<f64>>,
    optimizer_tensor_us: Option<Sourced<f64>>,
    whole_gradient_us: Option<Sourced<f64>>,
    parallel_linear_us: Option<Sourced<f64>>,
    transfer_ms: Option<Sourced<f64>>,
    context_mib: Option<Sourced<f64>>,
    workspace_mib: Option<Sourced<f64>>,
    communicators_mib: Option<Sourced<f64>>,
    fragmentation: Option<Sourced<f64>>,
    overlap_slowdown: Option<Sourced<f64>>,
}

impl RuntimeFile {
    /// Fills absent fields from the runtime that this one extends.
    ///
    /// # Errors
    /// When a field is neither stated nor inherited, or a rewrite to remove is not inherited.
    pub fn resolve(self, parent: Option<&Runtime>) -> Result<Runtime, String> {
        let name = self.name.clone();
        let missing =
            |field: &str| format!("runtime {name}: {field} is neither stated nor inherited");
        macro_rules! field {
            ($name:ident) => {
                (self.$name.or(parent.map(|p| p.$name)))
                    .ok_or_else(|| missing(stringify!($name)))?
            };
        }
        let space = self
            .space
            .resolve(parent.map(|p| &p.space))
            .map_err(|error| format!("runtime {name}: space: {error}"))?;
        let mut rewrites = parent.map_or_else(Rewrites::default, |p| p.rewrites);
        rewrites.extend(self.add_rewrites);
        for rewrite in &self.remove_rewrites {
            if !rewrites.remove(rewrite) {
                return Err(format!(
                    "runtime {name}: cannot remove {rewrite:?}, it is not inherited"
                ));
            }
        }
        Ok(Runtime {
            description: self.description,
            space,
            rewrites,
            selective: field!(selective),
            attention: field!(attention),
            fp16_gradients: (self.fp16_gradients)
                .or_else(|| parent.filter(|_| self.states.is_none())?.fp16_gradients),
            states: field!(states),
            overlap: field!(overlap),
            unsharded: field!(unsharded),
            master_in_f32_jobs: field!(master_in_f32_jobs),
            copies_into_buckets: field!(copies_into_buckets),
            held_whole: self.held_whole.or(parent.and_then(|p| p.held_whole)),
            zero3_once: field!(zero3_once),
            dispatcher: field!(dispatcher),
            second_sort: field!(second_sort),
            routed_tokens: field!(routed_tokens),
            graphs: field!(graphs),
            fp8_recipe: field!(fp8_recipe),
            overheads: self
                .overheads
                .resolve(parent.map(|p| &p.overheads))
                .map_err(|f| missing(&f))?,
            name: self.name,
        })
    }
}

impl SpaceFile {
    /// Takes what is absent from another runtime's space.
    fn resolve(self, parent: Option<&RuntimeSpace>) -> serde_json::Result<RuntimeSpace> {
        let mut fields: Map<String, Value> = match parent {
            Some(space) => serde_json::from_value(serde_json::to_value(space)?)?,
            None => Map::new(),
        };
        let stated: Map<String, Value> = serde_json::from_value(serde_json::to_value(self)?)?;
        fields.extend(stated.into_iter().filter(|(_, value)| !value.is_null()));
        serde_json::from_value(Value::Object(fields))
    }
}

impl OverheadsFile {
    fn resolve(self, parent: Option<&Overheads>) -> Result<Overheads, String> {
        macro_rules! field {
            ($raw:ident, $name:ident, $convert:expr) => {
                (self.$raw.map(|s| map(s, $convert)))
                    .or(parent.map(|p| p.$name.clone()))
                    .ok_or_else(|| concat!("overheads.", stringify!($raw)).to_owned())?
            };
        }
        Ok(Overheads {
            launch: field!(launch_us, launch, |us| Seconds(us * 1e-6)),
            step: field!(step_ms, step, |ms| Seconds(ms * 1e-3)),
            gradient_byte: field!(gradient_byte_ns, gradient_byte, |ns| Seconds(ns * 1e-9)),
            optimizer_bytes: field!(optimizer_bytes, optimizer_bytes, |bytes| bytes),
            optimizer_tensor: field!(optimizer_tensor_us, optimizer_tensor, |us| Seconds(
                us * 1e-6
            )),
            whole_gradient: field!(whole_gradient_us, whole_gradient, |us| Seconds(us * 1e-6)),
            parallel_linear: field!(parallel_linear_us, parallel_linear, |us| Seconds(us * 1e-6)),
            transfer: field!(transfer_ms, transfer, |ms| Seconds(ms * 1e-3)),
            context: field!(context_mib, context, mebibytes),
            workspace: field!(workspace_mib, workspace, mebibytes),
            communicators: field!(communicators_mib, communicators, mebibytes),
            fragmentation: field!(fragmentation, fragmentation, |x| x),
            overlap_slowdown: field!(overlap_slowdown, overlap_slowdown, |x| x),
        })
    }
}

fn mebibytes(mib: f64) -> Bytes {
    Bytes((mib * f64::from(1u32 << 20)) as u64)
}

fn map<T, U>(sourced: Sourced<T>, convert: impl Fn(T) -> U) -> Sourced<U> {
    Sourced {
        value: convert(sourced.value),
        origin: sourced.origin,
        source: sourced.source,
    }
}
