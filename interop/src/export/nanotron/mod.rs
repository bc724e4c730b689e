//! Export to nanotron: its YAML file.

mod model;
mod rewrites;

use catalog::{CpKind, Overlap, ScheduleKind, Zero};

use self::model::model;
use super::inputs::Input;
use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::refusal::Limits;
use super::stance::unmet;
use crate::config::{Node, Value, write};
use plans::decisions::{Decisions, Recompute};

const FILE: &str = "nanotron.yaml";
/// What nanotron overlaps without a switch for it: buckets of gradients in the last backward (optim/gradient_accumulator.py). It
/// waits for messages between stages.
pub(crate) const OVERLAP: Overlap = Overlap {
    grad_reduce: true,
    ..Overlap::NONE
};

pub(crate) fn program() -> Program {
    let setup = vec!["export CUDA_DEVICE_MAX_CONNECTIONS=1".to_owned()];
    let script = "\"${NANOTRON:-.}/run_train.py\"";
    let arguments = format!("{script} --config-file \"$HERE/{FILE}\" \"$@\"");
    Program::torchrun(setup, arguments)
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let (d, w) = (job.decisions, job.workload);
    refuse(job, limits);
    limits.differs(unmet(|rewrite| rewrites::stance(rewrite, job), job));
    let own = Overlap {
        tensor_parallel: d.overlap.tensor_parallel,
        ..OVERLAP
    };
    limits.overlaps(
        d,
        own,
        "gradients are reduced beside the last backward, and activations sent beside nothing",
    );
    let mut root = Node::table();
    root.set("general.project", "vescale-plan");
    root.set("general.run", job.id);
    parallelism(d, &mut root);
    root.set("model.dtype", job.dtype());
    root.set("model.make_vocab_size_divisible_by", 1);
    model(job, &mut root, limits);
    optimizer(&mut root);
    let tokenizer = "folder or hub name of the tokenizer";
    let tokenizer = limits.input_or_placeholder(&job.inputs, Input::Tokenizer, tokenizer);
    root.set("tokenizer.tokenizer_name_or_path", tokenizer);
    root.set("tokens.sequence_length", w.seq_len);
    root.set("tokens.train_steps", 100);
    data(job, &mut root, limits);
    limits.note(
        true,
        "the learning rate and train_steps in nanotron.yaml are an example's: set your own",
    );
    limits.note(
        d.pp > 1,
        "nanotron places layers by their cost, not by the plan's stages",
    );
    vec![Draft::new(FILE, Heading::Hash, write::yaml(&root))]
}

/// Writes one stage of training, on one dataset.
fn data(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    let data = "hub name or path of the dataset, with a column `text`";
    let data = limits.input_or_placeholder(&job.inputs, Input::Data, data);
    let mut stage = Node::table();
    stage.set("name", "stable");
    stage.set("start_training_step", 1);
    stage.set("data.dataset.hf_dataset_or_datasets", data);
    stage.set("data.dataset.text_column_name", "text");
    stage.set("data.num_loading_workers", 1);
    stage.set("data.seed", 42);
    root.set("data_stages", Value::List(vec![stage]));
}

fn parallelism(d: &Decisions, root: &mut Node) {
    let Decisions {
        tp,
        pp,
        cp,
        // Refused but for one value.
        cp_kind: _,
        axis_order: _,
        stages: _,
        vpp: _,
        ep: _,
        etp: _,
        dp_shard,
        dp_replicate,
        zero,
        // Part of ZeRO-3, which is refused.
        reshard_after_forward: _,
        sequence_parallel,
        micro_batch,
        num_micro_batches,
        recompute,
        schedule,
        overlap:
            Overlap {
                // nanotron's own, for which it has no switches.
                grad_reduce: _,
                param_gather: _,
                pipeline: _,
                tensor_parallel,
                expert_parallel: _,
            },
        // Refused.
        gradients: _,
        optimizer_states: _,
        offload: _,
        offload_layers: _,
        prefetch: _,
        dispatcher: _,
        graphs: _,
        fp8_recipe: _,
    } = d;
    let mut axis = |key: &str, value: Value| root.set(&format!("parallelism.{key}"), value);
    axis("dp", (dp_shard * dp_replicate).into());
    axis("pp", (*pp).into());
    axis("tp", (*tp).into());
    axis("context_parallel_size", (*cp).into());
    axis("expert_parallel_size", 1.into());
    let engine = ["1f1b", "afab"][usize::from(*schedule == ScheduleKind::GPipe)];
    axis("pp_engine", engine.into());
    let mode = ["ALL_REDUCE", "REDUCE_SCATTER"][usize::from(*sequence_parallel)];
    axis("tp_mode", mode.into());
    let beside = *tensor_parallel && *tp > 1;
    axis("tp_linear_async_communication", beside.into());
    axis("recompute_layer", (*recompute == Recompute::Full).into());
    root.set("optimizer.zero_stage", u64::from(u8::from(*zero)));
    root.set("tokens.micro_batch_size", *micro_batch);
    root.set("tokens.batch_accumulation_per_replica", *num_micro_batches);
}

/// nanotron's file is complete only with an optimizer; these are its example's values.
fn optimizer(root: &mut Node) {
    root.set("optimizer.accumulate_grad_in_fp32", true);
    root.set("optimizer.clip_grad", 1.0);
    root.set("optimizer.weight_decay", 0.01);
    root.set("optimizer.optimizer_factory.name", "adamW");
    root.set("optimizer.optimizer_factory.adam_beta1", 0.9);
    root.set("optimizer.optimizer_factory.adam_beta2", 0.95);
    root.set("optimizer.optimizer_factory.adam_eps", 1e-8);
    root.set("optimizer.optimizer_factory.torch_adam_is_fused", true);
    let rate = "optimizer.learning_rate_scheduler";
    root.set(&format!("{rate}.learning_rate"), 0.0003);
    root.set(&format!("{rate}.lr_warmup_steps"), 2);
    root.set(&format!("{rate}.lr_warmup_style"), "linear");
    root.set(&format!("{rate}.lr_decay_style"), "cosine");
    root.set(&format!("{rate}.min_decay_lr"), 0.00001);
}

fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    let why = "expert_parallel_size is an axis of its own there, not folded into data parallelism";
    limits.refuse_experts(d, why);
    refuse_stages(d, job.model.layers, limits);
    limits.refuse(
        d.cp > 1 && d.cp_kind != CpKind::AllGather,
        "cp_kind=all_gather",
        "its attention gathers keys and values (llama3_ring_attention)",
    );
    refuse_states(d, limits);
    limits.refuse_states(job, None);
    limits.refuse_all_graphs(d, job.runtime);
    limits.refuse_as(
        d.overlap.tensor_parallel && d.tp > 1 && !d.sequence_parallel,
        "overlap=tp with sp=off",
        "tp_linear_async_communication needs tp_mode REDUCE_SCATTER",
        Some(("sp", "on".to_owned())),
    );
    limits.refuse_order(d, "its mesh is pp, dp, cp, tp, outermost first");
    limits.refuse_partial_recompute(d, "it recomputes whole layers, all of them");
    limits.refuse_fp8(job, "its configuration has no fp8 training");
}

fn refuse_stages(d: &Decisions, layers: u64, limits: &mut Limits) {
    limits.refuse(
        d.pp > 1 && !matches!(d.schedule, ScheduleKind::OneFOneB | ScheduleKind::GPipe),
        "schedule=1f1b",
        "it has 1f1b and afab (GPipe) only",
    );
    limits.refuse_as(
        !d.stages.is_uniform() && d.stages != plans::StagePartition::even(layers, d.pp),
        "stages",
        "it places layers by their cost",
        Some(("vpp", "1".to_owned())),
    );
}

fn refuse_states(d: &Decisions, limits: &mut Limits) {
    limits.refuse(
        d.zero != Zero::Z0,
        "zero=0",
        "it has no ZeRO-2 or 3, and its ZeRO-1 stops with NotImplementedError when it reduces gradients (optim/gradient_accumulator.py, get_fp32_accum_hook)",
    );
}
