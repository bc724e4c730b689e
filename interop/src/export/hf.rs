//! Export to accelerate (FSDP2) and axolotl, which both drive Hugging Face's trainer.

use catalog::model::Family;

use catalog::runtime::Rewrite;
use catalog::{
    Architecture, CpKind, DType, Dispatcher, GradientTypes, OffloadKind, Overlap, Packing,
    Precision, Zero,
};

use super::adapters;
use super::documents;
use super::inputs::Input;
use super::job::{Draft, Heading, Job};
use super::launch::{Program, Starter};
use super::refusal::Limits;
use super::script::{self, TRAIN_SCRIPT};
use super::script_rewrites::{self, System};
use crate::config::escape::shell;
use crate::config::{Node, Value, write};
use plans::decisions::{Decisions, Recompute};

const ACCELERATE: &str = "accelerate.yaml";
const AXOLOTL: &str = "axolotl.yaml";

/// The Trainer's name of AdamW with 8-bit moments; `None` if the plan lacks them. FSDP2 and tensor
/// parallelism need torchao's kernels, which take DTensors (axolotl, utils/schemas/validation.py).
pub(super) fn eight_bit(d: &Decisions) -> Option<&'static str> {
    let name = match sharded(d) || d.tp > 1 {
        true => "adamw_torch_8bit",
        false => "adamw_bnb_8bit",
    };
    d.optimizer_states.map(|_| name)
}

/// Whether the job has to switch TF32 units on: 32-bit products are predicted on them where the GPU has them, as NVIDIA's have
/// since Ampere, and PyTorch leaves them off. On others the Trainer refuses the switch (training_args.py, `__post_init__`).
pub(super) fn tf32(job: &Job<'_>) -> bool {
    let has_units = match job.cluster.device.architecture {
        Architecture::Ampere
        | Architecture::Ada
        | Architecture::Hopper
        | Architecture::Blackwell
        | Architecture::BlackwellRtx => true,
        Architecture::Volta | Architecture::Cdna3 | Architecture::Cpu => false,
    };
    has_units && job.workload.precision == Precision::Fp32
}

/// How accelerate starts training: what its file cannot hold is passed to the training script as trainer arguments.
pub(crate) fn accelerate_program(job: &Job<'_>) -> Program {
    let d = job.decisions;
    let mut arguments = format!(
        "--config_file \"$HERE/{ACCELERATE}\" \"${TRAIN_SCRIPT}\" \\\n  \
         --per_device_train_batch_size {} --gradient_accumulation_steps {} --max_length {}",
        d.micro_batch, d.num_micro_batches, job.workload.seq_len
    );
    if let Some(name) = eight_bit(d) {
        arguments.push_str(&format!(" --optim {name}"));
    }
    if tf32(job) {
        arguments.push_str(" --tf32 true");
    }
    // With FSDP accelerate's file has it.
    if !sharded(d) && d.recompute == Recompute::Full {
        arguments.push_str(" --gradient_checkpointing true");
    }
    for (option, input) in [
        ("--model_name_or_path", Input::HfId),
        ("--dataset_name", Input::Data),
    ] {
        if let Some(given) = input.given(&job.inputs) {
            arguments.push_str(&format!(" {option} {}", shell(given)));
        }
    }
    arguments.push_str(" \"$@\"");
    Program {
        setup: script::setup(&job.inputs),
        starter: Starter::Accelerate,
        arguments,
    }
}

pub(crate) fn axolotl_program() -> Program {
    let arguments = format!("-m axolotl.cli.train \"$HERE/{AXOLOTL}\" \"$@\"");
    Program::torchrun(Vec::new(), arguments)
}

/// Refuses what neither system can express, and says what both do with every decision. The model is a Transformers
/// model, named by its id or folder; the file holds nothing of it.
pub(crate) fn refuse(job: &Job<'_>, system: &System, limits: &mut Limits) {
    let Decisions {
        // Written as the mesh's sizes.
        tp: _,
        cp: _,
        cp_kind: _,
        dp_shard: _,
        dp_replicate: _,
        // Refused above 1, with all that pipelines have.
        pp: _,
        vpp: _,
        schedule: _,
        stages: _,
        // Refused by accelerate; axolotl takes expert parallelism over all ranks.
        ep: _,
        etp: _,
        // Written as FSDP2's sharding or plain data parallelism.
        zero: _,
        reshard_after_forward: _,
        // Written as the trainer's batch size.
        micro_batch: _,
        num_micro_batches: _,
        recompute: _,
        // The mesh's order is dp_replicate, dp_shard, cp, tp.
        axis_order: _,
        // Refused; overlaps only where FSDP2 does something else.
        sequence_parallel: _,
        gradients: _,
        offload_layers: _,
        prefetch: _,
        dispatcher: _,
        graphs: _,
        fp8_recipe: _,
        overlap:
            Overlap {
                grad_reduce: _,
                param_gather: _,
                tensor_parallel: _,
                pipeline: _,
                expert_parallel: _,
            },
        // Written as the Trainer's optimizer.
        optimizer_states: _,
        // Written as FSDP2's offload of parameters.
        offload: _,
    } = job.decisions;
    script_rewrites::collect(job, system, limits);
    axes(job, limits);
    states(job.decisions, limits);
    limits.gradient_types(
        job,
        gradients(job),
        "there is no switch for the types of gradients",
    );
    optimizer_and_host(job.decisions, limits);
    overlap(job.decisions, limits);
    experts_and_passes(job, limits);
}

/// The types in which Hugging Face's systems hold and reduce gradients. Parameters and gradients have 32 bits. FSDP2 reduces in
/// the type of mixed precision (accelerate 1.15, `set_mixed_precision` in utils/dataclasses.py), plain replicas in 32 bits.
fn gradients(job: &Job<'_>) -> GradientTypes {
    GradientTypes {
        held: DType::F32,
        reduced: match sharded(job.decisions) {
            true => job.workload.precision.activation(),
            false => DType::F32,
        },
    }
}

/// Refuses ways to run passes and experts without a key, and FP8 recipes other than the runtime's.
fn experts_and_passes(job: &Job<'_>, limits: &mut Limits) {
    limits.refuse_expert_overlap(job.decisions);
    limits.refuse_dispatcher(job.decisions, job.runtime, &[Dispatcher::AllToAll]);
    limits.refuse_all_graphs(job.decisions, job.runtime);
    limits.refuse_recipe(job, &[job.runtime.fp8_recipe]);
}

/// Refuses optimizer states, offload and prefetching that have no key.
fn optimizer_and_host(d: &Decisions, limits: &mut Limits) {
    let whole = (d.optimizer_states).filter(|states| states.completes_parameters());
    limits.refuse(
        whole.is_some(),
        "optim_states=own",
        "its optimizers hold master weights whole, and moments in 32 or 8 bits",
    );
    limits.refuse_offload(d, Some(OffloadKind::Parameters));
    limits.refuse_offload_layers(d);
    limits.refuse_prefetch(d);
    limits.refuse_as(
        d.offload.is_some() && !d.reshard_after_forward,
        "reshard=off with offload",
        "parameters that come from the host are freed after forward",
        Some(("reshard", "on".to_owned())),
    );
}

fn axes(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    limits.refuse(d.pp > 1, "pp=1", "it has no pipeline parallelism");
    limits.refuse(
        d.sequence_parallel,
        "sp=off",
        "Transformers' tensor-parallel plans keep activations whole",
    );
    let kv = job.model.attention.kv_heads();
    limits.refuse(
        !kv.is_multiple_of(d.tp),
        "tp=1",
        format!("tp must divide the {kv} key/value heads"),
    );
}

fn states(d: &Decisions, limits: &mut Limits) {
    let sharing = d.dp_shard * d.cp;
    limits.refuse(
        matches!(d.zero, Zero::Z1 | Zero::Z2) && sharing > 1,
        "zero=3",
        "FSDP2 shards parameters, gradients and states together; where parameters are to stay gathered after \
         forward, that is zero=3 with reshard=off",
    );
    limits.refuse_as(
        d.zero == Zero::Z0 && d.dp_replicate > 1 && d.tp * d.cp > 1,
        "zero=0 with tp or cp",
        "replicated data parallelism cannot be combined with tensor or context parallelism",
        Some(("zero", "3".to_owned())),
    );
    limits.refuse_as(
        d.cp > 1 && !sharded(d),
        format!("cp={} with zero={}", d.cp, u8::from(d.zero)),
        "context-parallel ranks always shard the states",
        Some(("zero", "3".to_owned())),
    );
    limits.refuse_partial_recompute(d, "it checkpoints whole layers, all of them");
}

/// Whether FSDP2 shards states, and parameters with them.
pub(super) fn sharded(d: &Decisions) -> bool {
    d.zero == Zero::Z3
}

/// Refuses a kind of context parallelism not among those the target `has`, and suggests the first.
fn context(d: &Decisions, has: &[CpKind], why: &str, limits: &mut Limits) {
    limits.refuse_as(
        d.cp > 1 && !has.contains(&d.cp_kind),
        format!("cp_kind={}", d.cp_kind.name()),
        why,
        has.first().map(|kind| ("cp_kind", kind.name().to_owned())),
    );
}

fn overlap(d: &Decisions, limits: &mut Limits) {
    let o = d.overlap;
    let off = !o.grad_reduce || !o.param_gather && d.zero != Zero::Z0;
    limits.refuse_overlap(
        off && d.dp() * d.cp > 1 || o.tensor_parallel && d.tp > 1,
        "overlap",
        "FSDP2 overlaps gathering and reduction, and nothing else; there is no switch",
    );
}

pub(crate) fn accelerate(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let d = job.decisions;
    refuse(job, &script_rewrites::ACCELERATE, limits);
    script::inputs(limits);
    limits.refuse_experts(d, "it has no expert parallelism");
    limits.refuse_as(
        d.dp_replicate > 1 && d.dp_shard == 1 && d.tp > 1,
        format!(
            "dp_replicate={} with dp_shard=1, tp={}",
            d.dp_replicate, d.tp
        ),
        "replicated data parallelism with tensor parallelism needs dp_shard of at least 2",
        Some(("dp_replicate", "1".to_owned())),
    );
    let nodes = job.workload.gpus.div_ceil(job.cluster.gpus_per_node);
    let sharded = sharded(d);
    let mut root = Node::table();
    root.set("compute_environment", "LOCAL_MACHINE");
    let kind = match (sharded, job.workload.gpus) {
        (true, _) => "FSDP",
        (false, 1) => "NO",
        (false, _) => "MULTI_GPU",
    };
    root.set("distributed_type", kind);
    let precision = match job.workload.precision {
        Precision::Fp32 => "no",
        Precision::Fp16 => "fp16",
        Precision::Bf16 => "bf16",
        Precision::Fp8 => "fp8",
    };
    root.set("mixed_precision", precision);
    root.set("num_machines", nodes);
    root.set("machine_rank", 0);
    root.set("num_processes", job.workload.gpus);
    root.set("main_training_function", "main");
    root.set("use_cpu", false);
    root.set("debug", false);
    if sharded {
        accelerate_fsdp(d, &mut root);
    } else {
        limits.note(
            d.recompute == Recompute::Full,
            "without FSDP recomputation is the trainer's: the launch script passes --gradient_checkpointing true (--launcher torchrun)",
        );
    }
    if sharded || d.tp > 1 {
        accelerate_axes(d, &mut root, limits);
    }
    limits.note(
        true,
        "accelerate's file has no batch and no sequence: the launch script passes them to TRAIN_SCRIPT \
         as Trainer arguments (--launcher torchrun)",
    );
    vec![Draft::new(ACCELERATE, Heading::Hash, write::yaml(&root))]
}

fn accelerate_fsdp(d: &Decisions, root: &mut Node) {
    let fsdp = |key: &str| format!("fsdp_config.fsdp_{key}");
    root.set(&fsdp("version"), 2);
    root.set(&fsdp("auto_wrap_policy"), "TRANSFORMER_BASED_WRAP");
    root.set(&fsdp("reshard_after_forward"), d.reshard_after_forward);
    let full = d.recompute == Recompute::Full;
    root.set(&fsdp("activation_checkpointing"), full);
    root.set(&fsdp("state_dict_type"), "SHARDED_STATE_DICT");
    if d.offload.is_some() {
        root.set(&fsdp("offload_params"), true);
    }
}

fn accelerate_axes(d: &Decisions, root: &mut Node, limits: &mut Limits) {
    let why = "Ulysses comes with DeepSpeed there, not with FSDP2";
    context(d, &[CpKind::AllGather, CpKind::Ring], why, limits);
    let axis = |key: &str| format!("parallelism_config.parallelism_config_{key}");
    root.set(&axis("dp_replicate_size"), d.dp_replicate);
    root.set(&axis("dp_shard_size"), d.dp_shard);
    root.set(&axis("tp_size"), d.tp);
    root.set(&axis("cp_size"), d.cp);
    if d.cp > 1 {
        // PyTorch's ring attention is its rotation method `alltoall`.
        let kind = match d.cp_kind {
            CpKind::AllGather | CpKind::AllToAll => "allgather",
            CpKind::Ring => "alltoall",
        };
        root.set(&axis("cp_backend"), "torch");
        root.set(&axis("cp_comm_strategy"), kind);
    }
}

pub(crate) fn axolotl(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let d = job.decisions;
    refuse(job, &script_rewrites::AXOLOTL, limits);
    limits.refuse(d.etp > 1, "etp=1", "experts are not split");
    limits.refuse_as(
        d.ep > 1 && d.ep != job.workload.gpus,
        format!("ep={}", d.ep),
        "expert parallelism is an axis of its own there, beside dp_shard_size; it divides experts as the plan does only over all GPUs",
        Some(("ep", "1".to_owned())),
    );
    let mut root = Node::table();
    axolotl_inputs(job, &mut root, limits);
    if let Some(of) = job.model.adapters {
        root.set("adapter", "lora");
        root.set("lora_r", of.rank);
        root.set("lora_alpha", of.alpha);
        root.set("lora_dropout", of.dropout);
        root.set("lora_target_modules", adapters::names(job.model, limits));
    }
    root.set("sequence_len", job.workload.seq_len);
    axolotl_packing(job, &mut root, limits);
    root.set("micro_batch_size", d.micro_batch);
    root.set("gradient_accumulation_steps", d.num_micro_batches);
    axolotl_precision(job, &mut root, limits);
    let full = d.recompute == Recompute::Full;
    root.set("gradient_checkpointing", full);
    if full {
        // Checkpoints stop early unless they are re-entrant, as they are by default (utils/config/__init__.py,
        // `normalize_config`).
        let whole = !job.assumes(Rewrite::EarlyStopRecompute);
        root.set("gradient_checkpointing_kwargs.use_reentrant", whole);
    }
    if let Some(name) = eight_bit(d) {
        root.set("optimizer", name);
    }
    let rate = limits.placeholder("FILL_IN_LEARNING_RATE", "your learning rate");
    root.set("learning_rate", rate);
    if sharded(d) {
        axolotl_fsdp(d, &mut root);
    } else if d.tp > 1 {
        root.set("tensor_parallel_size", d.tp);
    }
    if d.ep > 1 {
        root.set(
            "plugins",
            vec!["axolotl.integrations.expert_parallel.ExpertParallelPlugin"],
        );
        root.set("expert_parallel_size", d.ep);
    }
    limits.note(true, "add your optimizer and output folder to axolotl.yaml");
    vec![Draft::new(AXOLOTL, Heading::Hash, write::yaml(&root))]
}

/// Writes axolotl's keys for the precision; refuses or notes where it trains differently. It holds
/// the model in the type it computes in (utils/config, `resolve_dtype`), adapters in 32 bits.
fn axolotl_precision(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    let precision = job.workload.precision;
    let whole = job.model.adapters.is_none();
    limits.refuse_as(
        whole && precision == Precision::Fp16,
        "precision fp16",
        "it holds weights in fp16, and PyTorch's loss scaling takes no gradients in fp16",
        None,
    );
    limits.note(
        whole && matches!(precision, Precision::Bf16 | Precision::Fp8),
        "axolotl trains 16-bit weights: they, their gradients, and moments that are not in 8 bits are held in bf16, \
         which takes less memory than predicted and rounds updates to bf16",
    );
    match precision {
        Precision::Fp32 => {
            root.set("bf16", false);
            if tf32(job) {
                root.set("tf32", true);
            }
        }
        Precision::Fp16 => root.set("fp16", true),
        Precision::Bf16 => root.set("bf16", true),
        Precision::Fp8 => {
            root.set("bf16", true);
            root.set("fp8", true);
        }
    }
}

fn axolotl_packing(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    // Only its all-gather reads where packed documents begin (monkeypatch/ring_attn/patch.py).
    let (kind, why) = match documents::within(job) {
        true => (
            CpKind::AllGather,
            "sequences of packed documents gather keys and values",
        ),
        false => (
            CpKind::Ring,
            "without sample_packing keys and values go around a ring",
        ),
    };
    context(job.decisions, &[kind], why, limits);
    if let Some(packing) = documents::packing(job) {
        let within = packing == Packing::Within;
        root.set("sample_packing", within);
        root.set("pad_to_sequence_len", true);
        if within {
            root.set("attn_implementation", "flash_attention_2");
        }
    }
}

fn axolotl_inputs(job: &Job<'_>, root: &mut Node, limits: &mut Limits) {
    let model = "the model's hub name, or a folder with its config.json";
    let model = limits.input_or_placeholder(&job.inputs, Input::HfId, model);
    root.set("base_model", model);
    // Otherwise weights keep the hub's MXFP4, which is not trained (its quantizer_mxfp4.py).
    if job.model.family == Family::GptOss {
        root.set("model_quantization_config", "Mxfp4Config");
        root.set("model_quantization_config_kwargs.dequantize", true);
    }
    // Without one, the model's own is used.
    if let Some(tokenizer) = job.inputs.tokenizer {
        root.set("tokenizer_config", tokenizer);
    }
    let data = "hub name or path of the dataset";
    let data = limits.input_or_placeholder(&job.inputs, Input::Data, data);
    let mut dataset = Node::table();
    dataset.set("path", data);
    dataset.set("type", "completion");
    root.set("datasets", Value::List(vec![dataset]));
}

fn axolotl_fsdp(d: &Decisions, root: &mut Node) {
    // Expert parallelism over all GPUs leaves no axis of shards; weights outside experts are sharded over all GPUs even so
    // (axolotl@067b021, integrations/expert_parallel/plugin.py, `_resolve_ep_group`; monkeypatch/accelerate/fsdp2.py).
    root.set("dp_shard_size", if d.ep > 1 { 1 } else { d.dp_shard });
    root.set("dp_replicate_size", d.dp_replicate);
    root.set("tensor_parallel_size", d.tp);
    root.set("context_parallel_size", d.cp);
    if d.cp > 1 {
        let function = match d.cp_kind {
            CpKind::Ring => "batch_ring",
            CpKind::AllGather | CpKind::AllToAll => "varlen_llama3",
        };
        root.set("ring_attn_func", function);
        root.set("attn_implementation", "flash_attention_2");
    }
    root.set("fsdp_version", 2);
    root.set("fsdp_config.reshard_after_forward", d.reshard_after_forward);
    root.set("fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP");
    root.set("fsdp_config.state_dict_type", "SHARDED_STATE_DICT");
    if d.offload.is_some() {
        root.set("fsdp_config.offload_params", true);
    }
}
