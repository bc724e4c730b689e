//! Export to DeepSpeed: the JSON that `deepspeed.initialize` reads.

use catalog::runtime::BUCKET_ELEMENTS;
use catalog::{CpKind, DType, Dispatcher, GradientTypes, Offload, Overlap, Precision, Zero};

use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::refusal::Limits;
use super::script::{self, TRAIN_SCRIPT};
use super::script_rewrites::{self, System};
use crate::config::{Node, write};
use plans::decisions::{Decisions, Recompute};

const FILE: &str = "ds_config.json";
/// Key for the number of elements that ZeRO-3 gathers ahead of use.
pub(crate) const PREFETCH: &str = "zero_optimization.stage3_prefetch_bucket_size";
/// DeepSpeed's default of [`PREFETCH`], in elements (`zero/config.py`).
pub(crate) const OWN_PREFETCH: u64 = 50_000_000;
/// DeepSpeed's default of the most elements that ZeRO-3 holds gathered (`zero/config.py`).
const MAX_LIVE: u64 = 1_000_000_000;

pub(crate) fn program(job: &Job<'_>) -> Program {
    let arguments = format!("\"${TRAIN_SCRIPT}\" --deepspeed \"$HERE/{FILE}\" \"$@\"");
    Program::torchrun(script::setup(&job.inputs), arguments)
}

/// The files of an export. The training script defines the model; the configuration holds nothing of it.
pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let root = configuration(job, &script_rewrites::DEEPSPEED, limits);
    script::inputs(limits);
    notes(job, limits);
    vec![Draft::new(FILE, Heading::Nowhere, write::json(&root))]
}

/// DeepSpeed's configuration, on its own or to be embedded in the file of the system that drives the engine.
pub(crate) fn configuration(job: &Job<'_>, system: &System, limits: &mut Limits) -> Node {
    refuse(job, limits);
    script_rewrites::collect(job, system, limits);
    let mut root = Node::table();
    precision(job, &mut root, limits);
    decided(job, &mut root);
    root
}

fn precision(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    let precision = job.workload.precision;
    match precision {
        Precision::Fp32 | Precision::Fp8 => return,
        Precision::Fp16 => root.set("fp16.enabled", true),
        Precision::Bf16 => root.set("bf16.enabled", true),
    }
    let types = job.state_types();
    let reduced = match types.reduce {
        DType::F32 => "fp32",
        _ if precision == Precision::Fp16 => "fp16",
        _ => "bf16",
    };
    root.set("communication_data_type", reduced);
    if types.gradient != Some(DType::F32) {
        return;
    }
    if job.decisions.zero != Zero::Z0 {
        root.set("data_types.grad_accum_dtype", "fp32");
        return;
    }
    // DeepSpeed refuses another type (runtime/engine.py, `_do_optimizer_sanity_check`).
    let held = precision.activation();
    let has = GradientTypes {
        held,
        reduced: match job.decisions.gradients {
            Some(_) => held,
            None => types.reduce,
        },
    };
    let why = "without ZeRO, DeepSpeed holds gradients in the type of the weights";
    limits.gradient_types(job, has, why);
}

/// Writes every decision of the plan.
fn decided(job: &Job<'_>, root: &mut Node) {
    let Decisions {
        tp,
        // Refused above 1, with all other pipeline decisions.
        pp: _,
        vpp: _,
        schedule: _,
        stages: _,
        cp,
        // Refused unless it is Ulysses.
        cp_kind: _,
        ep,
        etp,
        // Follows from the other axes.
        dp_shard: _,
        // Refused unless nothing is sharded.
        dp_replicate: _,
        zero,
        // Refused where it differs from what ZeRO-3 does.
        reshard_after_forward: _,
        micro_batch,
        num_micro_batches,
        recompute,
        // Data-parallel ranks are those that tensor and sequence parallelism leave.
        axis_order: _,
        overlap:
            Overlap {
                grad_reduce,
                // Refused where there is no switch.
                param_gather: _,
                tensor_parallel: _,
                pipeline: _,
                expert_parallel: _,
            },
        // Written with the precision.
        gradients: _,
        offload,
        prefetch,
        // Refused.
        sequence_parallel: _,
        optimizer_states: _,
        offload_layers: _,
        dispatcher: _,
        graphs: _,
        fp8_recipe: _,
    } = job.decisions;
    root.set("train_batch_size", job.workload.global_batch);
    root.set("train_micro_batch_size_per_gpu", *micro_batch);
    root.set("gradient_accumulation_steps", *num_micro_batches);
    sharding(*zero, *grad_reduce, root);
    if let Some(ahead) = *prefetch {
        prefetching(ahead, job.model.most_in_layer(*tp, ep * etp), root);
    }
    host(*offload, root);
    axes(*tp, *cp, root);
    experts(*ep, *etp, root);
    if *recompute == Recompute::Full {
        root.set(CHECKPOINTS, job.model.layers);
    }
}

/// The key that says how many layers are recomputed.
const CHECKPOINTS: &str = "activation_checkpointing.number_checkpoints";

fn axes(tp: u64, cp: u64, root: &mut Node) {
    if tp > 1 {
        root.set("tensor_parallel.autotp_size", tp);
    }
    if cp > 1 {
        root.set("sequence_parallel_size", cp);
    }
}

fn experts(ep: u64, etp: u64, root: &mut Node) {
    if ep > 1 {
        root.set("expert_parallel.enabled", true);
        root.set("expert_parallel.autoep_size", ep);
        root.set("expert_parallel.expert_tensor_parallel_size", etp);
    }
}

fn sharding(zero: Zero, grad_reduce: bool, root: &mut Node) {
    root.set("zero_optimization.stage", u64::from(u8::from(zero)));
    if zero != Zero::Z0 {
        root.set("zero_optimization.overlap_comm", grad_reduce);
        root.set("zero_optimization.reduce_bucket_size", BUCKET_ELEMENTS);
    }
    if matches!(zero, Zero::Z1 | Zero::Z2) {
        root.set("zero_optimization.allgather_bucket_size", BUCKET_ELEMENTS);
    }
}

/// Sets how far ahead parameters are gathered: `ahead` layers, of at most `layer` elements each.
/// Those and the layer that runs are live at once.
fn prefetching(ahead: u64, layer: u64, root: &mut Node) {
    root.set(PREFETCH, ahead.saturating_mul(layer));
    let live = (ahead + 1).saturating_mul(layer);
    if live > MAX_LIVE {
        root.set("zero_optimization.stage3_max_live_parameters", live);
    }
}

/// States in host memory, pinned so that copies run beside backward.
fn host(offload: Option<Offload>, root: &mut Node) {
    let sections: &[&str] = match offload {
        None => &[],
        Some(Offload::Optimizer(_)) => &["offload_optimizer"],
        Some(Offload::Parameters) => &["offload_optimizer", "offload_param"],
    };
    for section in sections {
        root.set(&format!("zero_optimization.{section}.device"), "cpu");
        root.set(&format!("zero_optimization.{section}.pin_memory"), true);
    }
}

fn notes(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    limits.note(
        true,
        format!(
            "DeepSpeed's file has no sequence length: make your batches {} tokens long",
            job.workload.seq_len
        ),
    );
    limits.note(
        d.recompute == Recompute::Full,
        "the model calls deepspeed.checkpointing.checkpoint on every layer (or HF gradient_checkpointing)",
    );
}

fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    limits.refuse(
        d.pp > 1,
        "pp=1",
        "pipeline stages are made in code (PipelineModule), not in the file",
    );
    limits.refuse(
        d.sequence_parallel,
        "sp=off",
        "its tensor parallelism keeps activations whole",
    );
    limits.refuse(
        d.cp > 1 && d.cp_kind != CpKind::AllToAll,
        "cp_kind=all_to_all",
        "it shards the sequence as Ulysses does",
    );
    limits.refuse(
        d.ep == 1 && d.etp > 1,
        "etp=1",
        "expert tensor parallelism comes with expert parallelism",
    );
    limits.refuse_dispatcher(d, job.runtime, &[Dispatcher::AllToAll]);
    limits.refuse_partial_recompute(d, "it checkpoints whole layers, all of them");
    limits.refuse_fp8(job, "it trains in fp16, bf16 and fp32");
    states(d, limits);
    limits.refuse_optimizer_states(d);
    limits.refuse_offload_layers(d);
    limits.refuse_all_graphs(d, job.runtime);
    limits.refuse(
        matches!(d.offload, Some(Offload::Optimizer(percent)) if percent < 100),
        "offload=optimizer",
        "it keeps the optimizer states of all weights in host memory",
    );
}

fn states(d: &Decisions, limits: &mut Limits) {
    limits.refuse_as(
        d.zero != Zero::Z0 && d.dp_replicate > 1,
        format!("dp_replicate={} with zero={}", d.dp_replicate, u8::from(d.zero)),
        "it shards states over all data-parallel ranks: MiCS was removed in 0.19.8, and hpZ keeps a second copy of \
         the parameters beside states that all ranks share",
        Some(("dp_replicate", "1".to_owned())),
    );
    limits.refuse(
        d.zero == Zero::Z3 && !d.reshard_after_forward,
        "reshard=on",
        "ZeRO-3 frees parameters after forward",
    );
    limits.refuse_overlap(
        d.dp() * d.cp > 1 && d.zero == Zero::Z3 && !d.overlap.param_gather,
        "overlap",
        "there is no switch for this at this ZeRO stage; with overlap allowed, it overlaps what it can",
    );
    limits.refuse_overlap(
        d.overlap.tensor_parallel && d.tp > 1,
        "overlap=tp",
        "its tensor-parallel collectives are not split",
    );
    limits.refuse_expert_overlap(d);
}
