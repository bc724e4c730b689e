//! veScale's own form: a sharding plan of regular expressions, and a `PipelineParallelPlan`.

use std::collections::BTreeMap;

use catalog::{Precision, ScheduleKind, Zero};

use super::job::{ExportedFile, Job, python_heading};
use super::launch::{Program, Starter};
use super::refusal::Limits;
use crate::config::escape;
use plans::decisions::{Decisions, Recompute};
use plans::grammar::recompute_name;

const FILE: &str = "sharding_plan.py";

pub(crate) fn program() -> Program {
    Program {
        setup: vec![
            ": \"${TRAIN_SCRIPT:?set TRAIN_SCRIPT to your training script}\"".to_owned(),
            "export PYTHONPATH=\"$HERE${PYTHONPATH:+:$PYTHONPATH}\"".to_owned(),
        ],
        starter: Starter::Torchrun,
        arguments: "\"$TRAIN_SCRIPT\" \"$@\"".to_owned(),
    }
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<ExportedFile> {
    let d = job.decisions;
    refuse(job, limits);
    let mut text = format!(
        "{}\
         from vescale.dtensor.placement_types import InterleavedShard, Partial, Replicate, Shard\n\
         from vescale.plan import ModeType, PipelineParallelPlan, PipelineScheduleType, PipelineSplitMethodType\n\n",
        python_heading(job)
    );
    text.push_str("sharding_plan = {\n    \"parameter\": {\n");
    entries(&job.sharding.parameter, false, limits, &mut text);
    text.push_str("    },\n    \"forward\": {\n");
    entries(&job.sharding.forward, true, limits, &mut text);
    text.push_str("    },\n}\n\n");
    text.push_str(&pipeline(d));
    text.push_str(&batch(job));
    vec![ExportedFile {
        name: FILE.to_owned(),
        text,
        executable: false,
    }]
}

/// Each pattern with its placement on the tensor-parallel axis, the one axis of the plan's mesh.
fn entries(
    plan: &BTreeMap<String, Vec<String>>,
    forward: bool,
    limits: &mut Limits,
    text: &mut String,
) {
    for (pattern, placements) in plan {
        let of_axis = |p: &String| p.strip_prefix("tp: ").map(str::to_owned);
        let placement = placements.iter().find_map(of_axis);
        let placement = placement.unwrap_or_else(|| "Replicate".to_owned());
        let Some(python) = python(&placement) else {
            limits.refuse(
                true,
                format!("sharding of {pattern}"),
                format!("it has no placement {placement}"),
                None,
            );
            continue;
        };
        let value = if forward {
            format!("[[{python}]]")
        } else {
            format!("[{python}]")
        };
        text.push_str(&format!(
            "        {}: {value},\n",
            escape::python_pattern(&qualified(pattern))
        ));
    }
}

/// Patterns of a plan match within a block; veScale matches whole names.
fn qualified(pattern: &str) -> String {
    let pattern = pattern.trim_start_matches("/?");
    format!(r"(.*\.)?{}", pattern.replace(r"\{expert\}", r"\d+"))
}

/// A placement as veScale writes it.
fn python(placement: &str) -> Option<String> {
    let (name, inside) = match placement.split_once(['(', ' ', '{']) {
        Some((name, inside)) => (name.trim(), inside.trim_end_matches([')', '}']).trim()),
        None => (placement.trim(), ""),
    };
    let numbers: Vec<&str> = inside
        .split(|c: char| !c.is_ascii_digit())
        .filter(|n| !n.is_empty())
        .collect();
    match (name, numbers.as_slice()) {
        ("Replicate", _) => Some("Replicate()".to_owned()),
        ("Partial", _) => Some("Partial()".to_owned()),
        ("Shard", [dim]) => Some(format!("Shard({dim})")),
        ("Interleaved", [dim, groups]) => Some(format!("InterleavedShard({dim}, {groups})")),
        _ => None,
    }
}

fn pipeline(d: &Decisions) -> String {
    if d.pp == 1 {
        return "pipeline_plan = None\n\n".to_owned();
    }
    let schedule = match d.schedule {
        ScheduleKind::Interleaved => "INTERLEAVED_1F1B",
        ScheduleKind::GPipe => "GPIPE",
        ScheduleKind::ZbH1 => "ZERO_BUBBLE",
        ScheduleKind::OneFOneB | ScheduleKind::ZbV | ScheduleKind::DualPipeV => "SIMPLE_1F1B",
    };
    let mut boundary = 0;
    let mut points = Vec::new();
    for layers in &d.stages.0[..d.stages.0.len() - 1] {
        boundary += layers;
        points.push(format!("\"model.layers.{}\"", boundary.saturating_sub(1)));
    }
    format!(
        "# Each split point ends a stage.\n\
         pipeline_plan = PipelineParallelPlan(\n    mode=ModeType.GRAPH_EAGER,\n    \
         split_method=PipelineSplitMethodType.MANUAL,\n    num_stages={},\n    virtual_chunks={},\n    \
         split_points=[{}],\n    schedule_type=PipelineScheduleType.{schedule},\n)\n\n",
        d.pp,
        d.vpp,
        points.join(", ")
    )
}

fn batch(job: &Job<'_>) -> String {
    let (d, w) = (job.decisions, job.workload);
    let flag = |on: bool| if on { "True" } else { "False" };
    format!(
        "mesh_shape = {{\"PP\": {}, \"DP\": {}, \"TP\": {}}}\n\
         use_distributed_optimizer = {}\n\
         overlap_grad_reduce = {}\n\
         micro_batch_size = {}\n\
         num_microbatches = {}\n\
         global_batch_size = {}\n\
         sequence_length = {}\n\
         dtype = \"{}\"\n",
        d.pp,
        d.dp(),
        d.tp,
        flag(d.zero == Zero::Z1),
        flag(d.overlap.grad_reduce),
        d.micro_batch,
        d.num_micro_batches,
        w.global_batch,
        w.seq_len,
        match w.precision {
            Precision::Fp32 => "float32",
            Precision::Fp16 => "float16",
            Precision::Bf16 | Precision::Fp8 => "bfloat16",
        }
    )
}

fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    limits.refuse(
        d.cp > 1,
        format!("cp={}", d.cp),
        "its mesh has no context-parallel axis",
        Some(("cp", "1".to_owned())),
    );
    limits.refuse(
        d.ep > 1 || d.etp > 1,
        format!("ep={}, etp={}", d.ep, d.etp),
        "a sharding plan places experts on the tensor-parallel axis only",
        Some(("ep", "1".to_owned())),
    );
    limits.refuse(
        matches!(d.zero, Zero::Z2 | Zero::Z3) || d.zero == Zero::Z1 && d.dp_replicate > 1,
        format!("zero={}, dp_replicate={}", u8::from(d.zero), d.dp_replicate),
        "its DistributedOptimizer shards optimizer states over all data-parallel ranks",
        Some(("zero", "1".to_owned())),
    );
    limits.refuse(
        d.pp > 1 && matches!(d.schedule, ScheduleKind::ZbV | ScheduleKind::DualPipeV),
        format!("schedule={}", d.schedule),
        "it has 1F1B, interleaved, GPipe and zero-bubble (ZB-H1) schedules",
        Some(("schedule", "interleaved".to_owned())),
    );
    let none = matches!(d.recompute, Recompute::None | Recompute::Layers(0));
    limits.refuse(
        !none,
        format!("recompute={}", recompute_name(d.recompute)),
        "its plan has no recomputation; wrap layers in your model",
        Some(("recompute", "none".to_owned())),
    );
    limits.refuse(
        job.workload.precision == Precision::Fp8,
        "precision fp8",
        "it trains in fp32, fp16 and bf16",
        None,
    );
}
