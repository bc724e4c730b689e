//! Megatron-LM: a bash file that sets the array `MEGATRON_ARGS`.

use catalog::{AxisOrder, CpKind, Precision, ScheduleKind, Zero};

use super::flag::Flag;
use super::job::{ExportedFile, Job, heading};
use super::launch::{Program, Starter};
use super::model;
use super::refusal::Limits;
use crate::config::escape;
use plans::decisions::{Decisions, Recompute};
use plans::grammar::{order_name, recompute_name};

/// Name of the file written.
pub(crate) const FILE: &str = "megatron_args.sh";

/// What starts Megatron-LM with the file.
pub(crate) fn program(job: &Job<'_>) -> Program {
    let mut setup = vec![format!("source \"$HERE/{FILE}\"")];
    // Megatron-LM asks for one connection, so that communication starts before compute; its FSDP
    // asks for the contrary.
    if matches!(job.decisions.zero, Zero::Z0 | Zero::Z1) {
        setup.push("export CUDA_DEVICE_MAX_CONNECTIONS=1".to_owned());
    }
    Program {
        setup,
        starter: Starter::Torchrun,
        arguments: "\"${MEGATRON_LM:-.}/pretrain_gpt.py\" \"${MEGATRON_ARGS[@]}\" \"$@\""
            .to_owned(),
    }
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<ExportedFile> {
    let sections = [
        ("Model", model::flags(job.model, limits)),
        ("Parallelism", parallelism(job, limits)),
        ("Batch and sequence", batch(job)),
        ("Precision", precision(job.workload.precision)),
        ("States", states(job.decisions, limits)),
        ("Recomputation", recompute(job.decisions, limits)),
        ("Overlap", overlap(job.decisions, limits)),
    ];
    let mut text = format!(
        "# {}\n# Data, tokenizer, optimizer and number of steps are yours: add them after these.\n\
         GPUS={}\nMEGATRON_ARGS=(\n",
        heading(job),
        job.workload.gpus
    );
    for (title, flags) in sections {
        if !flags.is_empty() {
            text.push_str(&format!("  # {title}\n"));
        }
        for flag in flags {
            text.push_str("  ");
            text.push_str(flag.name);
            for value in &flag.values {
                text.push(' ');
                text.push_str(&escape::shell(value));
            }
            text.push('\n');
        }
    }
    text.push_str(")\n");
    vec![ExportedFile {
        name: FILE.to_owned(),
        text,
        executable: false,
    }]
}

/// The options of every decision, without the model's.
pub(crate) fn decisions(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let d = job.decisions;
    let mut flags = parallelism(job, limits);
    flags.extend(batch(job));
    flags.extend(states(d, limits));
    flags.extend(recompute(d, limits));
    flags.extend(overlap(d, limits));
    flags
}

fn parallelism(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let d = job.decisions;
    let mut flags = vec![
        Flag::value("--tensor-model-parallel-size", d.tp),
        Flag::value("--pipeline-model-parallel-size", d.pp),
        Flag::value("--context-parallel-size", d.cp),
    ];
    if d.sequence_parallel {
        flags.push(Flag::switch("--sequence-parallel"));
    }
    if d.cp > 1 {
        let kind = match d.cp_kind {
            CpKind::Ring => "p2p",
            CpKind::AllGather => "all_gather",
            CpKind::AllToAll => "a2a",
        };
        flags.push(Flag::value("--cp-comm-type", kind));
    }
    if job.model.moe.is_some() {
        flags.push(Flag::value("--expert-model-parallel-size", d.ep));
        flags.push(Flag::value("--expert-tensor-parallel-size", d.etp));
        flags.push(Flag::value("--moe-token-dispatcher-type", "alltoall"));
    }
    order(d, limits, &mut flags);
    pipeline(job, limits, &mut flags);
    flags
}

fn order(d: &Decisions, limits: &mut Limits, flags: &mut Vec<Flag>) {
    if d.pp == 1 || d.dp() == 1 || d.axis_order == AxisOrder::TP_CP_DP_PP {
        return;
    }
    if d.axis_order == AxisOrder::TP_CP_PP_DP {
        flags.push(Flag::switch("--use-tp-pp-dp-mapping"));
        return;
    }
    limits.refuse(
        true,
        format!("order={}", order_name(d.axis_order)),
        "ranks are laid out tp-cp-ep-dp-pp or, with --use-tp-pp-dp-mapping, tp-cp-ep-pp-dp",
        Some(("order", order_name(AxisOrder::TP_CP_DP_PP))),
    );
}

fn pipeline(job: &Job<'_>, limits: &mut Limits, flags: &mut Vec<Flag>) {
    let d = job.decisions;
    if d.pp == 1 {
        return;
    }
    match d.schedule {
        ScheduleKind::OneFOneB | ScheduleKind::Interleaved => {}
        ScheduleKind::GPipe | ScheduleKind::ZbH1 => limits.refuse(
            true,
            format!("schedule={}", d.schedule),
            "it has 1F1B and interleaved schedules only",
            Some(("schedule", "1f1b".to_owned())),
        ),
        ScheduleKind::ZbV | ScheduleKind::DualPipeV => limits.refuse(
            true,
            format!("schedule={}", d.schedule),
            "it has 1F1B and interleaved schedules only",
            Some(("schedule", "interleaved".to_owned())),
        ),
    }
    if d.stages.is_uniform() && job.model.mtp_layers == 0 {
        if d.vpp > 1 {
            let layers = job.model.layers / (d.pp * d.vpp);
            flags.push(Flag::value(
                "--num-layers-per-virtual-pipeline-stage",
                layers,
            ));
        }
    } else {
        let layout = layout(&d.stages.0, job.model.mtp_layers);
        flags.push(Flag::value("--pipeline-model-parallel-layout", layout));
    }
}

/// `Et*9|t*10|t*11L`: embedding, decoder layers, MTP layers and loss of every virtual stage.
pub(crate) fn layout(stages: &[u64], mtp: u64) -> String {
    let last = stages.len() - 1;
    let stage = |(index, &layers): (usize, &u64)| {
        let mut text = String::new();
        if index == 0 {
            text.push('E');
        }
        text.push_str(&repeated('t', layers));
        if index == last {
            text.push_str(&repeated('m', mtp));
            text.push('L');
        }
        text
    };
    let parts: Vec<String> = stages.iter().enumerate().map(stage).collect();
    parts.join("|")
}

fn repeated(letter: char, count: u64) -> String {
    match count {
        0 => String::new(),
        1 => letter.to_string(),
        n => format!("{letter}*{n}"),
    }
}

fn batch(job: &Job<'_>) -> Vec<Flag> {
    let w = job.workload;
    vec![
        Flag::value("--micro-batch-size", job.decisions.micro_batch),
        Flag::value("--global-batch-size", w.global_batch),
        Flag::value("--seq-length", w.seq_len),
        Flag::value(
            "--max-position-embeddings",
            w.seq_len.max(job.model.max_position),
        ),
    ]
}

fn precision(precision: Precision) -> Vec<Flag> {
    match precision {
        Precision::Fp32 => Vec::new(),
        Precision::Fp16 => vec![Flag::switch("--fp16")],
        Precision::Bf16 => vec![Flag::switch("--bf16")],
        Precision::Fp8 => vec![
            Flag::switch("--bf16"),
            Flag::value("--fp8-format", "hybrid"),
            Flag::value("--fp8-recipe", "tensorwise"),
        ],
    }
}

fn states(d: &Decisions, limits: &mut Limits) -> Vec<Flag> {
    let mut flags = Vec::new();
    let sharding = match d.zero {
        Zero::Z0 => return flags,
        Zero::Z1 => None,
        Zero::Z2 => Some("optim_grads"),
        Zero::Z3 => Some("optim_grads_params"),
    };
    flags.push(Flag::switch("--use-distributed-optimizer"));
    if d.dp_replicate > 1 {
        let flag = "--num-distributed-optimizer-instances";
        flags.push(Flag::value(flag, d.dp_replicate));
    }
    if let Some(sharding) = sharding {
        flags.push(Flag::switch("--use-megatron-fsdp"));
        flags.push(Flag::value("--data-parallel-sharding-strategy", sharding));
        flags.push(Flag::value("--ckpt-format", "fsdp_dtensor"));
    }
    limits.refuse(
        d.zero == Zero::Z3 && !d.reshard_after_forward,
        "reshard=off",
        "Megatron-FSDP frees parameters after forward; keeping them is ZeRO-2",
        Some(("reshard", "on".to_owned())),
    );
    flags
}

fn recompute(d: &Decisions, limits: &mut Limits) -> Vec<Flag> {
    let full = |method: &'static str, layers: u64| {
        vec![
            Flag::value("--recompute-granularity", "full"),
            Flag::value("--recompute-method", method),
            Flag::value("--recompute-num-layers", layers),
        ]
    };
    match d.recompute {
        Recompute::None | Recompute::Layers(0) => Vec::new(),
        Recompute::Selective => vec![
            Flag::value("--recompute-granularity", "selective"),
            Flag::value("--recompute-modules", "core_attn"),
        ],
        Recompute::Full => full("uniform", 1),
        Recompute::Layers(n) => full("block", n),
        Recompute::SelectiveOps => {
            limits.refuse(
                true,
                format!("recompute={}", recompute_name(d.recompute)),
                "it selects modules to recompute, not operators to keep",
                Some(("recompute", "selective".to_owned())),
            );
            Vec::new()
        }
    }
}

fn overlap(d: &Decisions, limits: &mut Limits) -> Vec<Flag> {
    let mut flags = Vec::new();
    let o = d.overlap;
    if o.grad_reduce && d.dp() * d.cp > 1 {
        flags.push(Flag::switch("--overlap-grad-reduce"));
    }
    if o.param_gather && d.zero != Zero::Z0 {
        flags.push(Flag::switch("--overlap-param-gather"));
        limits.refuse(
            !o.grad_reduce,
            "overlap=param",
            "--overlap-param-gather needs --overlap-grad-reduce",
            Some(("overlap", "grad+param+pp".to_owned())),
        );
    }
    if o.tensor_parallel && d.tp > 1 {
        flags.push(Flag::switch("--tp-comm-overlap"));
        limits.refuse(
            !d.sequence_parallel,
            "overlap=tp with sp=off",
            "--tp-comm-overlap needs --sequence-parallel",
            Some(("sp", "on".to_owned())),
        );
    }
    if d.pp > 1 && !o.pipeline {
        flags.push(Flag::switch("--no-overlap-p2p-communication"));
        limits.refuse(
            d.pp == 2 && d.vpp > 1,
            "overlap without pp, vpp above 1 and pp=2",
            "interleaving two ranks needs overlapped sends and receives",
            Some(("overlap", "grad+param+pp".to_owned())),
        );
    }
    limits.note(
        d.pp > 1 && d.vpp == 1 && o.pipeline,
        "Megatron-LM's 1F1B sends and receives beside nothing, whatever --overlap-p2p says",
    );
    flags
}
