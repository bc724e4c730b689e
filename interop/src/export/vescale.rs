//! Export to veScale's own form: a sharding plan of regular expressions, and a `PipelineParallelPlan`.

use std::collections::BTreeMap;

use catalog::{Overlap, ScheduleKind, Zero};

use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::refusal::Limits;
use super::script::{self, TRAIN_SCRIPT};
use super::script_rewrites;
use crate::config::escape;
use plans::decisions::{Decisions, Recompute};

const FILE: &str = "sharding_plan.py";

pub(crate) fn program(job: &Job<'_>) -> Program {
    let mut setup = script::setup(&job.inputs);
    setup.push("export PYTHONPATH=\"$HERE${PYTHONPATH:+:$PYTHONPATH}\"".to_owned());
    Program::torchrun(setup, format!("\"${TRAIN_SCRIPT}\" \"$@\""))
}

/// The files of an export. The training script defines the model; the file places its parameters by name.
pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    refuse(job, limits);
    script::inputs(limits);
    script_rewrites::collect(job, &script_rewrites::VESCALE, limits);
    let mut text = "from vescale.dtensor.placement_types import InterleavedShard, Partial, Replicate, Shard\n\
         from vescale.plan import ModeType, PipelineParallelPlan, PipelineScheduleType, PipelineSplitMethodType\n\n"
        .to_owned();
    text.push_str("sharding_plan = {\n    \"parameter\": {\n");
    entries(&job.sharding.parameter, false, limits, &mut text);
    text.push_str("    },\n    \"forward\": {\n");
    entries(&job.sharding.forward, true, limits, &mut text);
    text.push_str("    },\n}\n\n");
    text.push_str(&pipeline(job.decisions));
    text.push_str(&batch(job));
    vec![Draft::new(FILE, Heading::Docstring, text)]
}

/// Each pattern with its placement on the tensor-parallel axis, the only axis of the sharding plan's mesh.
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
            limits.refuse_as(
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

/// A pattern for whole parameter names, as veScale matches; a plan's patterns match within a block.
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
         split_points=[{}],\n    overlap_p2p_comm={},\n    schedule_type=PipelineScheduleType.{schedule},\n)\n\n",
        d.pp,
        d.vpp,
        points.join(", "),
        if d.overlap.pipeline { "True" } else { "False" },
    )
}

fn batch(job: &Job<'_>) -> String {
    let Decisions {
        tp,
        pp,
        // Written with the plans of the pipeline and of sharding.
        sequence_parallel: _,
        vpp: _,
        schedule: _,
        stages: _,
        // Refused.
        cp: _,
        cp_kind: _,
        ep: _,
        etp: _,
        recompute: _,
        gradients: _,
        optimizer_states: _,
        offload: _,
        offload_layers: _,
        prefetch: _,
        dispatcher: _,
        graphs: _,
        fp8_recipe: _,
        reshard_after_forward: _,
        axis_order: _,
        dp_shard,
        dp_replicate,
        zero,
        micro_batch,
        num_micro_batches,
        overlap:
            Overlap {
                grad_reduce,
                param_gather,
                // Refused, or written with the pipeline's plan.
                tensor_parallel: _,
                expert_parallel: _,
                pipeline: _,
            },
    } = job.decisions;
    let flag = |on: bool| if on { "True" } else { "False" };
    format!(
        "mesh_shape = {{\"PP\": {pp}, \"DP\": {}, \"TP\": {tp}}}\n\
         use_distributed_optimizer = {}\n\
         overlap_grad_reduce = {}\n\
         overlap_param_gather = {}\n\
         micro_batch_size = {micro_batch}\n\
         num_microbatches = {num_micro_batches}\n\
         global_batch_size = {}\n\
         sequence_length = {}\n\
         dtype = \"{}\"\n",
        dp_shard * dp_replicate,
        flag(*zero == Zero::Z1),
        flag(*grad_reduce),
        flag(*param_gather),
        job.workload.global_batch,
        job.workload.seq_len,
        job.dtype()
    )
}

fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    limits.refuse_states(job, None);
    limits.refuse_all_graphs(d, job.runtime);
    limits.refuse(d.cp > 1, "cp=1", "its mesh has no context-parallel axis");
    let why = "a sharding plan places experts on the tensor-parallel axis only";
    limits.refuse_experts(d, why);
    limits.refuse_as(
        matches!(d.zero, Zero::Z2 | Zero::Z3) || d.zero == Zero::Z1 && d.dp_replicate > 1,
        format!("zero={}, dp_replicate={}", u8::from(d.zero), d.dp_replicate),
        "its DistributedOptimizer shards optimizer states over all data-parallel ranks",
        Some(("zero", "1".to_owned())),
    );
    limits.refuse(
        d.pp > 1 && matches!(d.schedule, ScheduleKind::ZbV | ScheduleKind::DualPipeV),
        "schedule=interleaved",
        "it has 1F1B, interleaved, GPipe and zero-bubble (ZB-H1) schedules",
    );
    limits.refuse_order(d, "its mesh is PP, DP, TP, outermost first");
    limits.refuse_overlap(
        d.overlap.tensor_parallel && d.tp > 1,
        "overlap=tp",
        "its tensor-parallel collectives are not split",
    );
    let none = matches!(d.recompute, Recompute::None | Recompute::Layers(0));
    limits.refuse(
        !none,
        "recompute=none",
        "its plan has no recomputation; wrap layers in your model",
    );
    limits.refuse_fp8(job, "it trains in fp32, fp16 and bf16");
}
