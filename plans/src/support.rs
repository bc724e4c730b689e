//! Which decisions of a strategy a runtime supports.

use catalog::model::ModelConfig;
use catalog::runtime::{RecomputeMode, RuntimeSpace, SequenceParallelUse};
use catalog::{
    Axis, CudaGraphs, Dispatcher, Fp8Recipe, GradientTypes, Offload, Overlap, Precision,
    RecomputeModule, Runtime, ScheduleKind, Selection, Zero,
};

use crate::decisions::{Decisions, Recompute, alone};
use crate::divided::{beside_predictions, unfit_context};
use crate::grammar::{order_name, overlap_name};
use crate::legality::StrategyError;

/// Checks that a runtime supports a strategy's decisions.
///
/// # Errors
/// The first decision that it does not support, and what it supports instead.
pub fn allowed_by(
    d: &Decisions,
    model: &ModelConfig,
    runtime: &Runtime,
    precision: Precision,
) -> Result<(), StrategyError> {
    let space = &runtime.space;
    let lack = untrained(runtime, precision)
        .or_else(|| unlisted(d, model, space))
        .or_else(|| tensor_lack(d, model, space))
        .or_else(|| precision_lack(d, runtime, precision))
        .or_else(|| context_lack(d, model, space))
        .or_else(|| prediction_lack(d, model, space))
        .or_else(|| layout_lack(d, model, space))
        .or_else(|| overlap_lack(d, runtime))
        .or_else(|| recompute_lack(d, space))
        .or_else(|| module_lack(d, model, runtime))
        .or_else(|| gradient_lack(d, runtime, precision))
        .or_else(|| optimizer_lack(d, runtime, precision))
        .or_else(|| offload_lack(d, runtime))
        .or_else(|| expert_lack(d, model, runtime, precision))
        .or_else(|| graph_lack(d, model, runtime))
        .or_else(|| recipe_lack(d, runtime, precision))
        .or_else(|| prefetch_lack(d, runtime))
        .or_else(|| kept_lack(d, runtime));
    match lack {
        None => Ok(()),
        Some(Lack { what, has }) => Err(StrategyError::Runtime {
            runtime: runtime.name.clone(),
            what,
            has,
        }),
    }
}

/// A decision that a runtime does not support, and what it supports instead.
struct Lack {
    what: String,
    has: String,
}

fn lacks(what: impl Into<String>, has: impl Into<String>) -> Option<Lack> {
    let (what, has) = (what.into(), has.into());
    Some(Lack { what, has })
}

/// Finds a precision that the runtime does not train in.
fn untrained(runtime: &Runtime, precision: Precision) -> Option<Lack> {
    let all = &runtime.space.precisions;
    if all.contains(&precision) {
        return None;
    }
    let has = all.iter().map(|of| format!("--precision {}", of.name()));
    lacks(
        format!("training in {}", precision.name()),
        list(has, "none"),
    )
}

/// Finds a schedule, a kind of context parallelism or a ZeRO level that the runtime does not list.
fn unlisted(d: &Decisions, model: &ModelConfig, space: &RuntimeSpace) -> Option<Lack> {
    if d.pp > 1 && !space.schedules.contains(&d.schedule) {
        let has = list(&space.schedules, "no pipeline parallelism");
        return lacks(format!("pipeline schedule {}", d.schedule), has);
    }
    if d.pp > 1 && model.tied_embeddings && !space.tied_in_pipelines {
        return lacks(
            "pipelines of models whose embeddings are tied to the head",
            "pp=1",
        );
    }
    let fewest = space.fewest_micro_batches(d.schedule, d.pp);
    if d.pp > 1 && d.num_micro_batches < fewest {
        let (count, pp) = (d.num_micro_batches, d.pp);
        let what = format!(
            "pipeline schedule {} of {count} micro-batches on {pp} ranks",
            d.schedule
        );
        return lacks(what, format!("it with {fewest} micro-batches or more"));
    }
    if d.cp > 1 && !space.cp_kinds.contains(&d.cp_kind) {
        let kinds = space.cp_kinds.iter().map(|kind| kind.name());
        let has = list(kinds, "no context parallelism");
        return lacks(format!("context parallelism by {}", d.cp_kind.name()), has);
    }
    let alone = alone([d.dp(), d.cp, d.tp], [d.ep, d.etp], model);
    if !(alone && d.zero == Zero::Z0 || space.zero_levels(d.pp).any(|level| level == d.zero)) {
        let levels = space.zero_levels(d.pp);
        let has = list(
            levels.map(|level| format!("ZeRO-{}", u8::from(level))),
            "none",
        );
        let elsewhere = space.zero.contains(&d.zero);
        let beside = if elsewhere {
            " beside pipeline parallelism"
        } else {
            ""
        };
        return lacks(format!("ZeRO-{}{beside}", u8::from(d.zero)), has);
    }
    None
}

fn tensor_lack(d: &Decisions, model: &ModelConfig, space: &RuntimeSpace) -> Option<Lack> {
    if d.tp > 1 && !space.tensor_parallel {
        return lacks("tensor parallelism", "tp=1");
    }
    match space.sequence_parallel {
        SequenceParallelUse::Never if d.sequence_parallel => {
            return lacks("sequence parallelism", "sp=off");
        }
        SequenceParallelUse::Always if d.tp > 1 && !d.sequence_parallel => {
            return lacks("tensor parallelism without sequence parallelism", "sp=on");
        }
        SequenceParallelUse::Never
        | SequenceParallelUse::Always
        | SequenceParallelUse::Usual
        | SequenceParallelUse::Choice => {}
    }
    let heads = model.attention.kv_heads();
    if d.tp > 1 && space.kv_heads_limit_tp && d.tp > heads {
        let has = format!("tp up to the {heads} key/value heads");
        return lacks(format!("tp={}", d.tp), has);
    }
    None
}

/// The lack of this precision under tensor or pipeline parallelism without sharded states, if any.
fn precision_lack(d: &Decisions, runtime: &Runtime, precision: Precision) -> Option<Lack> {
    let unsharded = d.dp_shard * d.cp == 1 && d.tp * d.pp > 1;
    if !(unsharded && runtime.casts_only_shards(precision)) {
        return None;
    }
    let name = precision.name();
    lacks(
        format!("{name} with tp or pp unless states are sharded (it would train in fp32)"),
        "zero3 over 2 or more data- or context-parallel ranks, or --precision fp32",
    )
}

/// Finds an attention that the runtime does not have under the strategy's kind of context parallelism.
fn context_lack(d: &Decisions, model: &ModelConfig, space: &RuntimeSpace) -> Option<Lack> {
    let (what, kinds) = unfit_context(d, model, space)?;
    lacks(
        format!(
            "attention with {what} under context parallelism by {}",
            d.cp_kind.name()
        ),
        list(kinds.iter().map(|kind| kind.name()), "cp=1"),
    )
}

/// Finds a pipeline or context parallelism beside prediction modules where the runtime has none there.
fn prediction_lack(d: &Decisions, model: &ModelConfig, space: &RuntimeSpace) -> Option<Lack> {
    let (what, has) = beside_predictions(d, model, space)?;
    lacks(format!("{what} beside multi-token-prediction modules"), has)
}

/// Whether experts have as many data-parallel ranks as the rest of the model. `spread` is `ep·etp` of a model with experts; without
/// experts Megatron-LM takes `tp` for it.
#[must_use]
pub fn equal_expert_dp(spread: Option<u64>, tp: u64, cp: u64) -> bool {
    spread.unwrap_or(tp) == tp * cp
}

/// Finds a placement of experts, states, layers or ranks that the runtime does not support.
fn layout_lack(d: &Decisions, model: &ModelConfig, space: &RuntimeSpace) -> Option<Lack> {
    if (d.ep > 1 || d.etp > 1) && !space.expert_parallel {
        return lacks("expert parallelism", "ep=1");
    }
    if model.moe.is_some() && !space.expert_split.allows([d.ep, d.etp], d.tp) {
        let sizes = space.expert_split.sizes(d.ep, d.tp).unwrap_or_default();
        let has = list(sizes.iter().map(|etp| format!("etp={etp}")), "none");
        return lacks(
            format!("etp={} beside ep={} and tp={}", d.etp, d.ep, d.tp),
            has,
        );
    }
    if d.zero != Zero::Z0 && d.dp_replicate > 1 && !space.hybrid_shard {
        return lacks("hybrid sharding", "dp_replicate=1");
    }
    if !d.stages.is_uniform() && !space.uneven_stages {
        return lacks("uneven stages", "stages of equal size");
    }
    if d.order_among(&space.axis_orders).is_none() {
        let has = list(space.axis_orders.iter().map(|&of| order_name(of)), "none");
        return lacks(format!("axis order {}", order_name(d.axis_order)), has);
    }
    let mut from_outermost = d.axis_order.0.iter().rev();
    let outermost = from_outermost.find(|&&axis| d.size(axis) > 1);
    let inner = d.pp > 1 && outermost != Some(&Axis::Pp);
    let spread = model.moe.map(|_| d.ep * d.etp);
    if inner && space.inner_pipeline_needs_equal_dp && !equal_expert_dp(spread, d.tp, d.cp) {
        let has = match spread {
            Some(_) => "pp last, or ep·etp = tp·cp",
            None => "pp last, or cp=1",
        };
        return lacks("axis order here in which pp is not last", has);
    }
    None
}

fn overlap_lack(d: &Decisions, runtime: &Runtime) -> Option<Lack> {
    let own = runtime.overlap;
    let several = d.dp() * d.cp > 1;
    let sent = Overlap {
        grad_reduce: d.overlap.grad_reduce && several,
        param_gather: d.overlap.param_gather && several && d.zero != Zero::Z0,
        tensor_parallel: d.overlap.tensor_parallel && d.tp > 1,
        pipeline: d.overlap.pipeline && d.pp > 1,
        expert_parallel: own.expert_parallel,
    };
    let has = format!("overlap={}", overlap_name(own));
    if let Some(what) = cannot_overlap(sent, runtime) {
        return lacks(format!("overlap of {what}"), has);
    }
    // A system that overlaps by itself does not where there is no sequence parallelism; one that is told to refuses.
    let told = sent.tensor_parallel && !own.tensor_parallel;
    if told && !d.sequence_parallel {
        let what = "overlap of tensor-parallel messages without sequence parallelism";
        return lacks(what, "sp=on");
    }
    if !several {
        return None;
    }
    let what = cannot_expose(d.overlap, d.zero, runtime)?;
    lacks(format!("{what} at zero={}", u8::from(d.zero)), has)
}

/// Data-parallel messages that `asked` exposes but this runtime must overlap at this ZeRO level.
#[must_use]
pub fn cannot_expose(asked: Overlap, zero: Zero, runtime: &Runtime) -> Option<&'static str> {
    let (own, space) = (runtime.overlap, &runtime.space);
    let gathers = zero != Zero::Z0;
    let [gradients, parameters] = [&space.exposed_gradients, &space.exposed_parameters];
    if own.grad_reduce && !asked.grad_reduce && !gradients.contains(&zero) {
        Some("gradient reduction apart from backward")
    } else if gathers && own.param_gather && !asked.param_gather && !parameters.contains(&zero) {
        Some("parameter gathering apart from passes")
    } else {
        None
    }
}

/// Messages (but those to experts) that `asked` overlaps and `runtime` cannot; `None` if none.
#[must_use]
pub fn cannot_overlap(asked: Overlap, runtime: &Runtime) -> Option<&'static str> {
    let own = runtime.overlap;
    let tensor = own.tensor_parallel || runtime.space.tensor_parallel_overlap;
    let kinds = [
        ("gradients", asked.grad_reduce, own.grad_reduce),
        ("parameters", asked.param_gather, own.param_gather),
        ("tensor-parallel messages", asked.tensor_parallel, tensor),
        ("pipeline messages", asked.pipeline, own.pipeline),
    ];
    let missing = kinds.into_iter().find(|(_, asked, has)| *asked && !has);
    missing.map(|(what, ..)| what)
}

fn recompute_lack(d: &Decisions, space: &RuntimeSpace) -> Option<Lack> {
    let mode = mode(d.recompute);
    if space.recompute.contains(&mode) {
        return None;
    }
    let has = list(space.recompute.iter().map(|m| m.name()), "none");
    lacks(format!("recompute {}", mode.name()), has)
}

fn module_lack(d: &Decisions, model: &ModelConfig, runtime: &Runtime) -> Option<Lack> {
    let Recompute::Modules(selection) = d.recompute else {
        return None;
    };
    let all = runtime.modules();
    let what = format!("recompute selective:{}", selection.name());
    if selection.and(all) != selection {
        return lacks(what, format!("selective:{}", all.name()));
    }
    if !selection.of_model(model).is_empty() {
        return None;
    }
    let has = format!("selective:{}", all.of_model(model).name());
    let why = match selection.contains(RecomputeModule::Norms) {
        true => ", whose norms are part of the linear layers after them",
        false => ", which has no such part",
    };
    lacks(format!("{what} for this model{why}"), has)
}

fn gradient_lack(d: &Decisions, runtime: &Runtime, precision: Precision) -> Option<Lack> {
    let asked = d.gradients?;
    let mut all = vec![runtime.own_gradients(precision)];
    all.extend(runtime.other_gradients_at(d.zero, precision));
    if all.contains(&asked) {
        return None;
    }
    let has = list(all.into_iter().map(GradientTypes::name), "none");
    let elsewhere = (runtime.other_gradients(precision)).any(|types| types == asked);
    let at = match elsewhere {
        true => format!(" at zero={}", u8::from(d.zero)),
        false => String::new(),
    };
    lacks(format!("gradients in {}{at}", asked.name()), has)
}

fn optimizer_lack(d: &Decisions, runtime: &Runtime, precision: Precision) -> Option<Lack> {
    let asked = d.optimizer_states?;
    let all = runtime.other_optimizers(precision);
    if all.contains(&asked) {
        return None;
    }
    let has = list(all.into_iter().map(|of| of.name()), "its own only");
    let what = format!("optimizer states {} in this precision", asked.name());
    lacks(what, has)
}

fn offload_lack(d: &Decisions, runtime: &Runtime) -> Option<Lack> {
    if d.offload_layers > 0 && !runtime.space.offload_layers {
        return lacks("offload of activations", "none");
    }
    let asked = d.offload?;
    if runtime.offload_option(asked, d.zero).is_some() {
        return None;
    }
    let has = runtime.space.offload.iter().map(|option| {
        let share = if option.partly { "[:N]" } else { "" };
        let (name, zero) = (option.states.name(), u8::from(option.from_zero));
        format!("offload={name}{share} from zero={zero}")
    });
    let what = format!("offload={} at zero={}", asked.name(), u8::from(d.zero));
    lacks(what, list(has, "no offload of states"))
}

fn prefetch_lack(d: &Decisions, runtime: &Runtime) -> Option<Lack> {
    if runtime.ahead(d.prefetch).is_some() {
        return None;
    }
    let others = runtime.space.prefetch.iter().map(|option| option.blocks);
    let all = [1].into_iter().chain(others);
    let has = list(all.map(|blocks| format!("prefetch={blocks}")), "none");
    lacks(format!("prefetch={}", d.prefetch?), has)
}

/// Finds parameters that stay gathered after forward where the runtime frees them.
fn kept_lack(d: &Decisions, runtime: &Runtime) -> Option<Lack> {
    let kept = d.zero == Zero::Z3 && !d.reshard_after_forward;
    let frees = runtime.zero3_once.reshards_by_default(d.pp) && !runtime.space.keep_after_forward;
    if !(kept && frees) {
        return None;
    }
    lacks("parameters that stay gathered after forward", "reshard=on")
}

/// Finds a way to send tokens to their experts that the runtime does not support.
fn expert_lack(
    d: &Decisions,
    model: &ModelConfig,
    runtime: &Runtime,
    precision: Precision,
) -> Option<Lack> {
    if d.ep == 1 {
        return None;
    }
    let space = &runtime.space;
    let asked = d.dispatcher.unwrap_or(runtime.dispatcher);
    if asked != runtime.dispatcher && !space.dispatchers.contains(&asked) {
        let all = [runtime.dispatcher].into_iter();
        let all = all.chain(space.dispatchers.iter().copied());
        let has = list(all.map(Dispatcher::name), "its own only");
        return lacks(format!("dispatcher {}", asked.name()), has);
    }
    if !space.expert_split.goes_with(asked, d.etp) {
        return lacks(
            format!("dispatcher {} with etp={}", asked.name(), d.etp),
            "it with etp=1",
        );
    }
    if d.overlap.expert_parallel == runtime.overlap.expert_parallel {
        return None;
    }
    let what = "overlap of messages to experts";
    if !space.expert_overlap {
        return lacks(what, "no choice of it");
    }
    let why =
        experts_cannot_overlap(d.schedule, d.pp, d.recompute, d.offload_layers).or_else(|| {
            if asked == Dispatcher::AllGather {
                Some("a dispatcher other than all_gather")
            } else if precision == Precision::Fp32 {
                Some("16-bit weights")
            } else if model.mtp_layers > MAX_OVERLAPPED_MTP {
                Some("at most one layer of multi-token prediction")
            } else {
                None
            }
        });
    lacks(what, format!("it only with {}", why?))
}

/// Most layers of multi-token prediction with which messages to experts overlap (Megatron-Core's `transformer_config.py`).
pub const MAX_OVERLAPPED_MTP: u64 = 1;

/// The missing condition for messages to experts to run beside the passes of another micro-batch,
/// if any. Forward passes must alternate with backward passes of other micro-batches. No layer may
/// be recomputed as a whole (`overlap_moe_expert_parallel_comm` in Megatron-Core's
/// `transformer_config.py`) or offload activations (`model_chunk_schedule_plan.py`).
#[must_use]
pub fn experts_cannot_overlap(
    schedule: ScheduleKind,
    pp: u64,
    recompute: Recompute,
    offload_layers: u64,
) -> Option<&'static str> {
    if offload_layers > 0 {
        return Some("offload_layers=0");
    }
    if pp > 1 && schedule != ScheduleKind::Interleaved {
        return Some("an interleaved schedule, or pp=1");
    }
    match recompute {
        Recompute::Full | Recompute::Layers(_) | Recompute::Falling(_) => {
            Some("recompute=none or selective")
        }
        Recompute::None
        | Recompute::Selective
        | Recompute::Modules(_)
        | Recompute::SelectiveOps => None,
    }
}

/// Finds a part of the step that the runtime does not capture in CUDA graphs.
fn graph_lack(d: &Decisions, model: &ModelConfig, runtime: &Runtime) -> Option<Lack> {
    let asked = d.graphs.filter(|asked| *asked != runtime.graphs)?;
    let what = format!("CUDA graphs of graphs={}", asked.name());
    if asked == CudaGraphs::None {
        return lacks("a step without CUDA graphs", runtime.graphs.name());
    }
    let Some(option) = runtime.graph_option(asked) else {
        let all = [runtime.graphs].into_iter();
        let all = all.chain(runtime.space.graphs.iter().map(|option| option.captures));
        let has = list(all.map(CudaGraphs::name), "none");
        return lacks(what, has);
    };
    let why = match () {
        () if d.pp > 1 && !option.pipelines => "pp=1",
        () if model.moe.is_some() && !option.experts => "models without experts",
        () if d.ep > 1 && asked == CudaGraphs::Step => "ep=1",
        () if d.offload_layers > 0 && asked == CudaGraphs::Layers => "offload_layers=0",
        () if d.offload == Some(Offload::Parameters) => "parameters on the device",
        () => graphs_cannot_capture(asked, d.recompute, model)?,
    };
    lacks(what, format!("them only with {why}"))
}

/// Finds a way to scale operands of 8-bit products that the runtime does not support, or not with what is recomputed.
fn recipe_lack(d: &Decisions, runtime: &Runtime, precision: Precision) -> Option<Lack> {
    let asked = d.fp8_recipe.unwrap_or(runtime.fp8_recipe);
    if precision != Precision::Fp8 {
        let what = format!("fp8_recipe={}", d.fp8_recipe?.name());
        return lacks(what, "it only with --precision fp8");
    }
    let all = [runtime.fp8_recipe].into_iter();
    let mut all = all.chain(runtime.space.fp8_recipes.iter().copied());
    if !all.clone().any(|known| known == asked) {
        let has = list(all.map(Fp8Recipe::name), "its own only");
        return lacks(format!("fp8_recipe={}", asked.name()), has);
    }
    let parts = recipe_cannot_recompute(asked, d.recompute, runtime)?.name();
    let what = format!("recomputation of {parts} with fp8_recipe={}", asked.name());
    let others = all.find(|other| recipe_cannot_recompute(*other, d.recompute, runtime).is_none());
    let has = others.map_or_else(
        || "it in 16 bits only".to_owned(),
        |other| format!("it with fp8_recipe={}", other.name()),
    );
    lacks(what, has)
}

/// The parts that are recomputed although this recipe forbids it; `None` if there are none.
#[must_use]
pub fn recipe_cannot_recompute(
    recipe: Fp8Recipe,
    recompute: Recompute,
    runtime: &Runtime,
) -> Option<Selection> {
    let selection = match recompute {
        Recompute::Modules(selection) => selection,
        Recompute::Selective => runtime.selective,
        Recompute::None
        | Recompute::Full
        | Recompute::Layers(_)
        | Recompute::Falling(_)
        | Recompute::SelectiveOps => return None,
    };
    recipe.cannot_recompute(selection)
}

/// Whether a runtime captures in CUDA graphs what a strategy asks for.
#[must_use]
pub fn graphs_allowed(d: &Decisions, model: &ModelConfig, runtime: &Runtime) -> bool {
    graph_lack(d, model, runtime).is_none()
}

/// The missing condition for these CUDA graphs; `None` if there is none. Neither whole layers nor
/// parts that draw random numbers may be recomputed (conditions of `cuda_graph_impl` in
/// Megatron-Core's `transformer_config.py`).
#[must_use]
pub fn graphs_cannot_capture(
    graphs: CudaGraphs,
    recompute: Recompute,
    model: &ModelConfig,
) -> Option<&'static str> {
    let again = |module| match recompute {
        Recompute::Modules(selection) => selection.contains(module),
        Recompute::Selective => module == RecomputeModule::CoreAttention,
        _ => false,
    };
    let whole = recompute.of_first_and_others()[0] == Recompute::Full;
    match graphs {
        CudaGraphs::None => None,
        CudaGraphs::Layers if whole => Some("recompute=none or selective"),
        _ if model.attention_dropout > 0.0 && again(RecomputeModule::CoreAttention) => {
            Some("attention kept, as it has dropout")
        }
        _ if model.hidden_dropout > 0.0 && again(RecomputeModule::Mlp) => {
            Some("feed-forward parts kept, as they have dropout")
        }
        CudaGraphs::Layers | CudaGraphs::Step => None,
    }
}

/// The kind of a recompute choice, without its parameters.
fn mode(recompute: Recompute) -> RecomputeMode {
    match recompute {
        Recompute::None => RecomputeMode::None,
        Recompute::Selective | Recompute::Modules(_) => RecomputeMode::Selective,
        Recompute::Full => RecomputeMode::Full,
        Recompute::Layers(_) => RecomputeMode::Layers,
        Recompute::Falling(_) => RecomputeMode::Falling,
        Recompute::SelectiveOps => RecomputeMode::SelectiveOps,
    }
}

fn list(items: impl IntoIterator<Item = impl ToString>, none: &str) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() {
        none.to_owned()
    } else {
        items.join(", ")
    }
}
