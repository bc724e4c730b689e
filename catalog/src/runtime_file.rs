//! Runtimes as files: each states what differs from the one it extends.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::cuda_graphs::{CudaGraphs, GraphOption};
use crate::dispatcher::Dispatcher;
use crate::fp8_recipe::Fp8Recipe;
use crate::offload::OffloadOption;
use crate::parallelism::{AxisOrder, CpKind, Overlap, ScheduleKind, Zero};
use crate::prefetch::PrefetchOption;
use crate::provenance::Sourced;
use crate::runtime::{
    AttentionKernel, Overheads, RecomputeMode, Rewrite, Rewrites, Runtime, RuntimeSpace,
    SequenceParallelUse,
};
use crate::selection::Selection;
use crate::sharding::{OncePerStep, Unsharded};
use crate::state_types::{GradientOption, OptimizerStates, StateTypes};
use crate::units::{Bytes, Seconds};

/// A runtime as written: what is absent is inherited.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuntimeFile {
    /// Version of this format.
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
    pub space: SpaceFile,
    /// Rewrites it performs beside the inherited ones.
    #[serde(default)]
    pub add_rewrites: Vec<Rewrite>,
    /// Inherited rewrites it does not perform.
    #[serde(default)]
    pub remove_rewrites: Vec<Rewrite>,
    /// What selective recomputation runs again.
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
    /// How tokens are sent to their experts by default.
    pub dispatcher: Option<Dispatcher>,
    /// What is captured in CUDA graphs by default.
    pub graphs: Option<CudaGraphs>,
    /// How the operands of 8-bit products are scaled by default.
    pub fp8_recipe: Option<Fp8Recipe>,
    /// Costs beside the model.
    #[serde(default)]
    pub overheads: OverheadsFile,
}

/// [`RuntimeSpace`] as written.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpaceFile {
    schedules: Option<Vec<ScheduleKind>>,
    cp_kinds: Option<Vec<CpKind>>,
    zero: Option<Vec<Zero>>,
    blocking_schedules: Option<Vec<ScheduleKind>>,
    one_message_at_a_time: Option<bool>,
    sink_cp_kinds: Option<Vec<CpKind>>,
    window_cp_kinds: Option<Vec<CpKind>>,
    axis_orders: Option<Vec<AxisOrder>>,
    inner_pipeline_needs_equal_dp: Option<bool>,
    recompute: Option<Vec<RecomputeMode>>,
    selections: Option<Vec<Selection>>,
    tensor_parallel: Option<bool>,
    sequence_parallel: Option<SequenceParallelUse>,
    expert_parallel: Option<bool>,
    hybrid_shard: Option<bool>,
    uneven_stages: Option<bool>,
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
    fragmentation: Option<Sourced<f64>>,
    overlap_slowdown: Option<Sourced<f64>>,
}

impl RuntimeFile {
    /// Fills what is absent from the runtime this one extends.
    ///
    /// # Errors
    /// Names the field that neither states.
    pub fn resolve(self, parent: Option<&Runtime>) -> Result<Runtime, String> {
        let name = self.name.clone();
        let missing =
            |field: &str| format!("runtime {name}: {field} is neither stated nor inherited");
        let space = self
            .space
            .resolve(parent.map(|p| &p.space))
            .map_err(|f| missing(&f))?;
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
            selective: inherit(self.selective, parent.map(|p| p.selective))
                .ok_or_else(|| missing("selective"))?,
            attention: inherit(self.attention, parent.map(|p| p.attention))
                .ok_or_else(|| missing("attention"))?,
            fp16_gradients: (self.fp16_gradients)
                .or_else(|| parent.filter(|_| self.states.is_none())?.fp16_gradients),
            states: inherit(self.states, parent.map(|p| p.states))
                .ok_or_else(|| missing("states"))?,
            overlap: inherit(self.overlap, parent.map(|p| p.overlap))
                .ok_or_else(|| missing("overlap"))?,
            unsharded: inherit(self.unsharded, parent.map(|p| p.unsharded))
                .ok_or_else(|| missing("unsharded"))?,
            master_in_f32_jobs: inherit(
                self.master_in_f32_jobs,
                parent.map(|p| p.master_in_f32_jobs),
            )
            .ok_or_else(|| missing("master_in_f32_jobs"))?,
            zero3_once: inherit(self.zero3_once, parent.map(|p| p.zero3_once))
                .ok_or_else(|| missing("zero3_once"))?,
            dispatcher: inherit(self.dispatcher, parent.map(|p| p.dispatcher))
                .ok_or_else(|| missing("dispatcher"))?,
            graphs: inherit(self.graphs, parent.map(|p| p.graphs))
                .ok_or_else(|| missing("graphs"))?,
            fp8_recipe: inherit(self.fp8_recipe, parent.map(|p| p.fp8_recipe))
                .ok_or_else(|| missing("fp8_recipe"))?,
            overheads: self
                .overheads
                .resolve(parent.map(|p| &p.overheads))
                .map_err(|f| missing(&f))?,
            name: self.name,
        })
    }
}

impl SpaceFile {
    fn resolve(self, parent: Option<&RuntimeSpace>) -> Result<RuntimeSpace, String> {
        macro_rules! field {
            ($name:ident) => {
                inherit(self.$name, parent.map(|p| p.$name.clone()))
                    .ok_or_else(|| concat!("space.", stringify!($name)).to_owned())?
            };
        }
        Ok(RuntimeSpace {
            schedules: field!(schedules),
            cp_kinds: field!(cp_kinds),
            zero: field!(zero),
            blocking_schedules: field!(blocking_schedules),
            one_message_at_a_time: field!(one_message_at_a_time),
            sink_cp_kinds: field!(sink_cp_kinds),
            window_cp_kinds: field!(window_cp_kinds),
            axis_orders: field!(axis_orders),
            inner_pipeline_needs_equal_dp: field!(inner_pipeline_needs_equal_dp),
            recompute: field!(recompute),
            selections: field!(selections),
            tensor_parallel: field!(tensor_parallel),
            sequence_parallel: field!(sequence_parallel),
            expert_parallel: field!(expert_parallel),
            hybrid_shard: field!(hybrid_shard),
            uneven_stages: field!(uneven_stages),
            kv_heads_limit_tp: field!(kv_heads_limit_tp),
            keep_after_forward: field!(keep_after_forward),
            gradients: field!(gradients),
            optimizer_states: field!(optimizer_states),
            offload: field!(offload),
            offload_layers: field!(offload_layers),
            prefetch: field!(prefetch),
            exposed_gradients: field!(exposed_gradients),
            exposed_parameters: field!(exposed_parameters),
            tensor_parallel_overlap: field!(tensor_parallel_overlap),
            expert_overlap: field!(expert_overlap),
            dispatchers: field!(dispatchers),
            graphs: field!(graphs),
            fp8_recipes: field!(fp8_recipes),
        })
    }
}

impl OverheadsFile {
    fn resolve(self, parent: Option<&Overheads>) -> Result<Overheads, String> {
        macro_rules! field {
            ($raw:ident, $name:ident, $convert:expr) => {
                inherit(
                    self.$raw.map(|s| map(s, $convert)),
                    parent.map(|p| p.$name.clone()),
                )
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
            fragmentation: field!(fragmentation, fragmentation, |x| x),
            overlap_slowdown: field!(overlap_slowdown, overlap_slowdown, |x| x),
        })
    }
}

fn mebibytes(mib: f64) -> Bytes {
    Bytes((mib * f64::from(1u32 << 20)) as u64)
}

fn inherit<T>(own: Option<T>, parent: Option<T>) -> Option<T> {
    own.or(parent)
}

fn map<T, U>(sourced: Sourced<T>, convert: impl Fn(T) -> U) -> Sourced<U> {
    Sourced {
        value: convert(sourced.value),
        origin: sourced.origin,
        source: sourced.source,
    }
}
