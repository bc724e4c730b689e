//! DeepSpeed: the JSON that `deepspeed.initialize` reads.

use catalog::{CpKind, Precision, Zero};

use super::job::{ExportedFile, Job};
use super::launch::{Program, Starter};
use super::refusal::Limits;
use crate::config::{Node, write};
use plans::decisions::{Decisions, Recompute};
use plans::grammar::recompute_name;

const FILE: &str = "ds_config.json";

pub(crate) fn program() -> Program {
    Program {
        setup: vec![": \"${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script}\"".to_owned()],
        starter: Starter::Torchrun,
        arguments: format!("\"$TRAIN_SCRIPT\" --deepspeed \"$HERE/{FILE}\" \"$@\""),
    }
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<ExportedFile> {
    let (d, w) = (job.decisions, job.workload);
    refuse(job, limits);
    let mut root = Node::table();
    root.set("train_batch_size", w.global_batch);
    root.set("train_micro_batch_size_per_gpu", d.micro_batch);
    root.set("gradient_accumulation_steps", d.num_micro_batches);
    match w.precision {
        Precision::Fp32 | Precision::Fp8 => {}
        Precision::Fp16 => root.set("fp16.enabled", true),
        Precision::Bf16 => root.set("bf16.enabled", true),
    }
    root.set("zero_optimization.stage", u64::from(u8::from(d.zero)));
    if d.zero != Zero::Z0 {
        root.set("zero_optimization.overlap_comm", d.overlap.grad_reduce);
    }
    if d.zero == Zero::Z3 {
        if !d.overlap.param_gather {
            root.set("zero_optimization.stage3_prefetch_bucket_size", 0);
        }
        if d.dp_replicate > 1 {
            root.set("zero_optimization.mics_shard_size", d.dp_shard);
        }
    }
    if d.tp > 1 {
        root.set("tensor_parallel.autotp_size", d.tp);
    }
    if d.cp > 1 {
        root.set("sequence_parallel_size", d.cp);
    }
    if d.ep > 1 {
        root.set("expert_parallel.enabled", true);
        root.set("expert_parallel.autoep_size", d.ep);
        root.set("expert_parallel.expert_tensor_parallel_size", d.etp);
    }
    if d.recompute == Recompute::Full {
        root.set(
            "activation_checkpointing.number_checkpoints",
            job.model.layers,
        );
    }
    notes(job, limits);
    vec![ExportedFile {
        name: FILE.to_owned(),
        text: write::json(&root),
        executable: false,
    }]
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
    limits.note(
        matches!(d.zero, Zero::Z1 | Zero::Z2) && d.overlap.param_gather,
        "DeepSpeed gathers parameters after the step, beside nothing",
    );
    limits.note(
        d.dp_replicate > 1 && d.zero == Zero::Z3,
        "mics_shard_size needs the model made under deepspeed.zero.MiCS_Init",
    );
}

fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    limits.refuse(
        d.pp > 1,
        format!("pp={}", d.pp),
        "pipeline stages are made in code (PipelineModule), not in the file",
        Some(("pp", "1".to_owned())),
    );
    limits.refuse(
        d.sequence_parallel,
        "sp=on",
        "its tensor parallelism keeps activations whole",
        Some(("sp", "off".to_owned())),
    );
    limits.refuse(
        d.cp > 1 && d.cp_kind != CpKind::AllToAll,
        format!("cp_kind={}", d.cp_kind.name()),
        "it shards the sequence as Ulysses does",
        Some(("cp_kind", CpKind::AllToAll.name().to_owned())),
    );
    limits.refuse(
        d.ep == 1 && d.etp > 1,
        format!("etp={}", d.etp),
        "expert tensor parallelism comes with expert parallelism",
        Some(("etp", "1".to_owned())),
    );
    let partial = matches!(d.recompute, Recompute::Layers(n) if n > 0);
    let chosen = matches!(d.recompute, Recompute::Selective | Recompute::SelectiveOps);
    limits.refuse(
        partial || chosen,
        format!("recompute={}", recompute_name(d.recompute)),
        "it checkpoints whole layers, all of them",
        Some(("recompute", "full".to_owned())),
    );
    limits.refuse(
        job.workload.precision == Precision::Fp8,
        "precision fp8",
        "it trains in fp16, bf16 and fp32",
        None,
    );
    states(d, limits);
}

fn states(d: &Decisions, limits: &mut Limits) {
    limits.refuse(
        matches!(d.zero, Zero::Z1 | Zero::Z2) && d.dp_replicate > 1,
        format!(
            "dp_replicate={} with zero={}",
            d.dp_replicate,
            u8::from(d.zero)
        ),
        "only ZeRO-3 (MiCS) shards within groups",
        Some(("zero", "3".to_owned())),
    );
    limits.refuse(
        d.zero == Zero::Z3 && !d.reshard_after_forward,
        "reshard=off",
        "ZeRO-3 frees parameters after forward",
        Some(("reshard", "on".to_owned())),
    );
    limits.refuse(
        d.zero == Zero::Z0 && !d.overlap.grad_reduce && d.dp() * d.cp > 1
            || matches!(d.zero, Zero::Z1 | Zero::Z2) && !d.overlap.param_gather,
        "overlap",
        "there is no switch for this at this ZeRO stage; allowed, it does what it can",
        Some(("overlap", "grad+param+pp".to_owned())),
    );
    limits.refuse(
        d.overlap.tensor_parallel && d.tp > 1,
        "overlap=tp",
        "its tensor-parallel collectives are not split",
        Some(("overlap", "grad+param+pp".to_owned())),
    );
}
