//! Export to Hugging Face's Trainer, with FSDP2 or DeepSpeed, and to LLaMA-Factory, which drives it with DeepSpeed: the
//! arguments of a training script such as transformers' `run_clm.py`.

use catalog::runtime::Rewrite;
use catalog::{Precision, Zero};

use super::adapters;
use super::documents;
use super::inputs::Input;
use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::refusal::Limits;
use super::script::{self, TRAIN_SCRIPT};
use super::script_rewrites::{ACCELERATE, LLAMA_FACTORY, TRANSFORMERS_DEEPSPEED};
use super::{deepspeed, hf};
use crate::config::{Node, write};
use plans::decisions::Recompute;

const ARGUMENTS: &str = "training_args.json";
const LLAMA_FACTORY_FILE: &str = "llamafactory.yaml";

/// How the Trainer is started: the training script reads its arguments from the file alone, as `run_clm.py` does.
pub(crate) fn program(job: &Job<'_>) -> Program {
    let arguments = format!("\"${TRAIN_SCRIPT}\" \"$HERE/{ARGUMENTS}\" \"$@\"");
    Program::torchrun(script::setup(&job.inputs), arguments)
}

pub(crate) fn llama_factory_program() -> Program {
    let arguments = format!("-m llamafactory.launcher \"$HERE/{LLAMA_FACTORY_FILE}\" \"$@\"");
    Program::torchrun(Vec::new(), arguments)
}

/// The Trainer's arguments: FSDP2 for ZeRO-3, else plain data-parallel replicas.
pub(crate) fn transformers(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    hf::refuse(job, &ACCELERATE, limits);
    replicas_and_shards(job, "accelerate takes it", limits);
    let d = job.decisions;
    let mut root = script_arguments(job, limits);
    trainer_arguments(job, &mut root, limits);
    let full = d.recompute == Recompute::Full;
    if hf::sharded(d) {
        root.set("fsdp", true);
        root.set("fsdp_config.version", 2);
        root.set("fsdp_config.reshard_after_forward", d.reshard_after_forward);
        root.set("fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP");
        root.set("fsdp_config.activation_checkpointing", full);
        root.set("fsdp_config.state_dict_type", "SHARDED_STATE_DICT");
        if d.offload.is_some() {
            root.set("fsdp_config.cpu_offload", true);
        }
    } else {
        root.set("gradient_checkpointing", full);
    }
    vec![Draft::new(ARGUMENTS, Heading::Nowhere, write::json(&root))]
}

/// The Trainer's arguments with DeepSpeed's configuration embedded.
pub(crate) fn with_deepspeed(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let engine = deepspeed::configuration(job, &TRANSFORMERS_DEEPSPEED, limits);
    replicas_and_shards(job, "the target deepspeed takes it", limits);
    let mut root = script_arguments(job, limits);
    trainer_arguments(job, &mut root, limits);
    let full = job.decisions.recompute == Recompute::Full;
    root.set("gradient_checkpointing", full);
    root.set("deepspeed", engine.value);
    vec![Draft::new(ARGUMENTS, Heading::Nowhere, write::json(&root))]
}

/// LLaMA-Factory's YAML: pre-training, or fine-tuning if attention stays within documents.
pub(crate) fn llama_factory(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let engine = deepspeed::configuration(job, &LLAMA_FACTORY, limits);
    replicas_and_shards(job, "the target deepspeed takes it", limits);
    let mut root = Node::table();
    let model = "the model's hub name, or a folder with its config.json";
    let model = limits.input_or_placeholder(&job.inputs, Input::HfId, model);
    root.set("model_name_or_path", model);
    let data = "name of the dataset in LLaMA-Factory's dataset_info.json";
    let data = limits.input_or_placeholder(&job.inputs, Input::Data, data);
    root.set("dataset", data);
    // Pre-training packs across documents; fine-tuning keeps them apart if it is told to.
    let within = documents::within(job);
    root.set("stage", if within { "sft" } else { "pt" });
    match job.model.adapters {
        None => root.set("finetuning_type", "full"),
        Some(of) => {
            root.set("finetuning_type", "lora");
            root.set("lora_rank", of.rank);
            root.set("lora_alpha", of.alpha);
            root.set("lora_dropout", of.dropout);
            root.set("lora_target", adapters::names(job.model, limits).join(","));
        }
    }
    root.set("cutoff_len", job.workload.seq_len);
    // Pretraining packs by itself; a written `packing` makes its sequences a token shorter.
    if within {
        root.set("packing", true);
        root.set("neat_packing", true);
    }
    let kept = job.decisions.recompute != Recompute::Full;
    root.set("disable_gradient_checkpointing", kept);
    if !kept {
        // Checkpoints stop early unless they are re-entrant, as they are by default (hparams/model_args.py).
        let whole = !job.assumes(Rewrite::EarlyStopRecompute);
        root.set("use_reentrant_gc", whole);
    }
    trainer_arguments(job, &mut root, limits);
    root.set("deepspeed", engine.value);
    limits.note(
        job.inputs.tokenizer.is_some(),
        "LLaMA-Factory takes the model's own tokenizer: --tokenizer is not written",
    );
    limits.note(
        job.model.moe.is_some() && !job.assumes(Rewrite::LaunchExpertsApart),
        "install Transformers 5, which multiplies all experts in one grouped product, as predicted; 4.55 to 4.57, which LLaMA-Factory also takes, launch each expert by itself",
    );
    vec![Draft::new(
        LLAMA_FACTORY_FILE,
        Heading::Hash,
        write::yaml(&root),
    )]
}

/// Refuses what the Trainer's arguments cannot express: axes beside data parallelism, replicas of shards, fp8. `taker`
/// says which target takes the axes.
fn replicas_and_shards(job: &Job<'_>, taker: &str, limits: &mut Limits) {
    let d = job.decisions;
    for (key, size) in [("tp", d.tp), ("cp", d.cp), ("ep", d.ep), ("etp", d.etp)] {
        limits.refuse_as(
            size > 1,
            format!("{key}={size}"),
            format!("the Trainer's arguments hold data parallelism alone; {taker}"),
            Some((key, "1".to_owned())),
        );
    }
    limits.refuse(
        d.zero != Zero::Z0 && d.dp_replicate > 1,
        "dp_replicate=1",
        "the Trainer's arguments shard over all data-parallel ranks; accelerate takes it",
    );
    limits.refuse_fp8(job, "it trains in fp16, bf16 and fp32");
}

/// The arguments of the training script itself, named as in `run_clm.py`.
fn script_arguments(job: &Job<'_>, limits: &mut Limits) -> Node {
    limits.variable(
        TRAIN_SCRIPT,
        "your training script; transformers' examples/pytorch/language-modeling/run_clm.py reads the file as it is",
    );
    let mut root = Node::table();
    let model = "the model's hub name, or a folder with its config.json";
    let model = limits.input_or_placeholder(&job.inputs, Input::HfId, model);
    root.set("model_name_or_path", model);
    // Without it weights keep their type on the hub; autocast alone makes no 32-bit ones.
    root.set("dtype", "float32");
    // Without one, the model's own is used.
    if let Some(tokenizer) = job.inputs.tokenizer {
        root.set("tokenizer_name", tokenizer);
    }
    let data = limits.input_or_placeholder(&job.inputs, Input::Data, "hub name of the dataset");
    root.set("dataset_name", data);
    root.set("block_size", job.workload.seq_len);
    root
}

/// The fields of `TrainingArguments` that every plan decides.
fn trainer_arguments(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    let d = job.decisions;
    root.set("do_train", true);
    root.set("output_dir", "output");
    if let Some(name) = hf::eight_bit(d) {
        root.set("optim", name);
    }
    root.set("per_device_train_batch_size", d.micro_batch);
    root.set("gradient_accumulation_steps", d.num_micro_batches);
    match job.workload.precision {
        Precision::Fp32 if hf::tf32(job) => root.set("tf32", true),
        Precision::Fp32 | Precision::Fp8 => {}
        Precision::Fp16 => root.set("fp16", true),
        Precision::Bf16 => root.set("bf16", true),
    }
    limits.note(
        true,
        "learning rate, number of steps and output folder are yours: set them in the file",
    );
}
