//! Import of files for Hugging Face's Trainer: its own arguments, LLaMA-Factory's, axolotl's and accelerate's YAML. Data
//! parallelism is FSDP's or that of a DeepSpeed configuration in the file.

use catalog::{CpKind, DType, GradientTypes, Overlap, Precision, WorkloadSizes, Zero};

use super::adapters;
use super::deepspeed;
use super::document::Document;
use super::error::ImportError;
use super::fsdp::{self, Sharding};
use super::hf_axes::{self, Axes};
use super::hf_precision::{self, precision};
use super::imported::{Given, Imported};
use super::kernels;
use super::optimizer;
use super::sizes::{devices, workload};
use super::unplanned;
use crate::config::{Node, Value};
use crate::export::Dialect;
use plans::decisions::{Decisions, Recompute};

/// Keys that give the sequence length in tokens; the first that is present counts.
const SEQUENCE: [&str; 7] = [
    "sequence_len",
    "cutoff_len",
    "block_size",
    "max_length",
    "max_seq_length",
    "model_max_length",
    "seq_length",
];

/// Keys that name the model; the first that is present counts.
const NAMES: [&str; 3] = ["base_model", "model_name_or_path", "config_name"];

/// The key that names the model, and the name.
pub(super) fn named(doc: &Document) -> Result<Option<(&'static str, &str)>, ImportError> {
    for key in NAMES {
        if let Some(name) = doc.text(key)? {
            return Ok(Some((key, name)));
        }
    }
    Ok(None)
}

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    let adapters = adapters::read(doc, given.model)?;
    let mut imported = match engine(doc)? {
        Some(engine) => with_deepspeed(doc, &engine, given)?,
        None => with_fsdp(doc, given)?,
    };
    if !doc.dialect.has_micro_batch() {
        let note = "accelerate's file has no batch: one sequence per micro-batch is assumed";
        imported.notes.push(format!("{}: {note}", doc.path));
    }
    // LLaMA-Factory's `packing` alone lets tokens see other documents.
    let packing = (doc.dialect != Dialect::LlamaFactory).then_some("packing");
    for key in ["sample_packing", "neat_packing"]
        .into_iter()
        .chain(packing)
    {
        if doc.on(key)? {
            imported.notes.push(format!(
                "{key}: the file does not say how long documents are; {}",
                unplanned::LENGTHS
            ));
        }
    }
    imported.decisions.recompute = recompute(doc, given.model.layers)?;
    if chooses_checkpoints(doc, &imported)? {
        imported.kernels.push(kernels::checkpoints(doc)?);
    }
    let embedding = kernels::embedding(doc, given.model, &imported.decisions);
    imported.kernels.extend(embedding);
    if let Some(key) = offloads_activations(doc) {
        if adapters.is_some() {
            imported.decisions.recompute = Recompute::None;
            imported.decisions.offload_layers = given.model.layers.saturating_sub(1);
        } else {
            let note = unplanned::note(doc, &[key], unplanned::INPUTS_ON_DEVICE);
            imported.notes.push(note);
        }
    }
    imported.notes.extend(unplanned::notes(doc));
    imported.decisions.optimizer_states = optimizer::states(doc, &mut imported)?;
    imported.adapters = adapters;
    imported.notes.extend(hf_precision::notes(doc, &imported)?);
    imported.dialect = doc.dialect;
    Ok(imported)
}

/// The DeepSpeed configuration that the file holds or names, if it has one.
fn engine(doc: &Document) -> Result<Option<Node>, ImportError> {
    for key in ["deepspeed", "deepspeed_config.deepspeed_config_file"] {
        match doc.find(key) {
            Some(node) if !node.entries().is_empty() => return Ok(Some(node.clone())),
            Some(node) => {
                if let Some(path) = node.text().filter(|path| path.ends_with(".json")) {
                    let why = format!(
                        "`{path}` cannot be read, from the folder of the configuration or from here"
                    );
                    return Err(doc.unsupported(key, &why));
                }
            }
            None => {}
        }
    }
    match doc.text("distributed_type")?.unwrap_or("NO") {
        "DEEPSPEED" => {}
        "MEGATRON_LM" => {
            let why = "import the script of Megatron-LM itself";
            return Err(doc.unsupported("distributed_type", why));
        }
        _ => return Ok(None),
    }
    let mut root = Node::table();
    for (theirs, name) in [
        ("zero_stage", "zero_optimization.stage"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        (
            "offload_optimizer_device",
            "zero_optimization.offload_optimizer.device",
        ),
        (
            "offload_param_device",
            "zero_optimization.offload_param.device",
        ),
    ] {
        // The Trainer's own value counts before accelerate's.
        let own = doc.dialect != Dialect::Accelerate && theirs == name;
        let node = doc.find(&format!("deepspeed_config.{theirs}"));
        if let Some(node) = node.filter(|_| !own) {
            root.set(name, node.value.clone());
        }
    }
    Ok(Some(root))
}

fn micro_batch(doc: &Document) -> Result<u64, ImportError> {
    if !doc.dialect.has_micro_batch() {
        return Ok(1);
    }
    let (key, usual) = match doc.dialect {
        Dialect::Axolotl => ("micro_batch_size", 1),
        // The default of `TrainingArguments`.
        _ => ("per_device_train_batch_size", 8),
    };
    match doc.size(key)? {
        None => Ok(usual),
        Some(_) => doc.degree(key),
    }
}

/// The sequence length of the file, else the one that was given, else the system's own.
fn sequence(doc: &Document, given: &Given<'_>) -> Result<u64, ImportError> {
    let mut found = None;
    for key in SEQUENCE {
        found = found.or(doc.size(key)?.map(|tokens| (key, tokens)));
    }
    let Some((key, tokens)) = found
        .or(usual_sequence(doc))
        .filter(|_| found.is_some() || given.seq_len.is_none())
    else {
        let how = "the file has none; give --seq";
        return (given.seq_len).ok_or_else(|| doc.missing("the sequence length", how));
    };
    match shortened(doc)? {
        true if tokens > 1 => Ok(tokens - 1),
        true => Err(doc.wrong(key, "2 or more tokens, of which packing takes one")),
        false => Ok(tokens),
    }
}

/// A system's own sequence length, where its file has none: axolotl's (utils/schemas/config.py) and LLaMA-Factory's
/// (hparams/data_args.py).
fn usual_sequence(doc: &Document) -> Option<(&'static str, u64)> {
    match doc.dialect {
        Dialect::Axolotl => Some(("sequence_len", 512)),
        Dialect::LlamaFactory => Some(("cutoff_len", 2048)),
        _ => None,
    }
}

/// Whether LLaMA-Factory trains on sequences that are one token shorter than the file's `cutoff_len`. With packing it takes
/// one token off that length. In supervised fine-tuning it pads the sequences back to it; in pretraining it does not.
fn shortened(doc: &Document) -> Result<bool, ImportError> {
    let pretraining = doc.text("stage")? == Some("pt");
    let packs = doc.on("packing")? || doc.on("neat_packing")?;
    Ok(doc.dialect == Dialect::LlamaFactory && pretraining && packs)
}

/// The key by which axolotl keeps activations in host memory. With adapters these are all activations, and none is computed
/// again; without, they are the inputs of layers (`_apply_activation_checkpointing` in its loaders/model.py).
fn offloads_activations(doc: &Document) -> Option<&'static str> {
    let on = |key: &str, kinds: [&str; 2]| match doc.find(key).map(|node| &node.value) {
        Some(Value::Bool(on)) => *on && key == "activation_offloading",
        Some(Value::Str(kind)) => kinds.contains(&kind.as_str()),
        _ => false,
    };
    let keys = [
        ("activation_offloading", ["legacy", "disk"]),
        ("gradient_checkpointing", ["offload", "offload_disk"]),
    ];
    let mut on = keys.into_iter().filter(|(key, kinds)| on(key, *kinds));
    on.next().map(|(key, _)| key)
}

/// What the file recomputes in backward; `layers` is the number of the model's layers.
fn recompute(doc: &Document, layers: u64) -> Result<Recompute, ImportError> {
    let on = |key: &str| match doc.find(key).map(|node| &node.value) {
        // axolotl also takes `offload` and other kinds.
        Some(Value::Str(kind)) => Ok(Some(!kind.is_empty())),
        _ => doc.flag(key),
    };
    let of_fsdp = ["activation_checkpointing", "fsdp_activation_checkpointing"];
    for key in of_fsdp.map(|key| format!("fsdp_config.{key}")) {
        if on(&key)? == Some(true) {
            return Ok(Recompute::Full);
        }
    }
    if doc.dialect == Dialect::LlamaFactory {
        let kept = on("disable_gradient_checkpointing")? == Some(true);
        return Ok(if kept {
            Recompute::None
        } else {
            Recompute::Full
        });
    }
    // The old name counts where the new one says nothing (transformers `training_args.py`, `__post_init__`).
    for name in ["activation_checkpointing", "gradient_checkpointing"] {
        let Some(on) = on(name)? else { continue };
        // The first of every n layers (`modeling_utils.py`, `_set_gradient_checkpointing`).
        let of = doc.size(&format!("{name}_kwargs.every_n_layers"))?;
        return Ok(match of {
            _ if !on => Recompute::None,
            Some(of @ 2..) => Recompute::Layers(layers.div_ceil(of)),
            _ => Recompute::Full,
        });
    }
    Ok(Recompute::None)
}

/// Whether the system recomputes by checkpoints of PyTorch that a key of the file makes re-entrant or not.
fn chooses_checkpoints(doc: &Document, imported: &Imported) -> Result<bool, ImportError> {
    if imported.decisions.recompute == Recompute::None {
        return Ok(false);
    }
    Ok(match doc.dialect {
        // Under FSDP2 it switches re-entrance off by itself (model/model_utils/checkpointing.py).
        Dialect::LlamaFactory => {
            imported.dialect == Dialect::DeepSpeed || imported.decisions.zero != Zero::Z3
        }
        // accelerate's own checkpoints, and those that keep inputs on the host or some operators' outputs, are not re-entrant
        // (axolotl@067b021, core/trainers/mixins/activation_checkpointing.py, utils/schemas/validation.py).
        Dialect::Axolotl => {
            let hidden = doc.find("activation_offloading").and_then(Node::text);
            let others = [
                "fsdp_config.activation_checkpointing",
                "fsdp_config.fsdp_activation_checkpointing",
            ];
            let by_fsdp = others.iter().any(|key| matches!(doc.on(key), Ok(true)));
            let chosen = matches!(
                doc.find("selective_checkpointing").map(|node| &node.value),
                Some(Value::Bool(true) | Value::Table(_))
            );
            let own = by_fsdp || chosen || hidden == Some("hidden_states");
            !own && offloads_activations(doc).is_none()
        }
        _ => false,
    })
}

/// Imports the file's DeepSpeed configuration; where it says `auto`, the Trainer's own values hold.
fn with_deepspeed(
    doc: &Document,
    engine: &Node,
    given: &Given<'_>,
) -> Result<Imported, ImportError> {
    let precision = precision(doc)?;
    let accumulate = doc.degree("gradient_accumulation_steps")?;
    let own: [(&str, Value); 5] = [
        ("train_micro_batch_size_per_gpu", micro_batch(doc)?.into()),
        ("gradient_accumulation_steps", accumulate.into()),
        // 8-bit products are those of layers; the engine sees the 16-bit numbers around them.
        (
            "bf16.enabled",
            matches!(precision, Precision::Bf16 | Precision::Fp8).into(),
        ),
        ("fp16.enabled", (precision == Precision::Fp16).into()),
        ("train_batch_size", Value::Null),
    ];
    let mut root = engine.clone();
    let cp = match doc.dialect {
        Dialect::Axolotl => hf_axes::axis(doc, "context_parallel")?,
        _ => 1,
    };
    if cp > 1 {
        root.set("sequence_parallel_size", cp);
    }
    for (key, value) in own {
        let open = root.at(key).is_none_or(|node| node.text() == Some("auto"));
        if open {
            root.set(key, value);
        }
    }
    let document = doc.rewritten(Dialect::DeepSpeed, root);
    let given = Given {
        gpus: devices(doc, given.gpus)?,
        seq_len: Some(sequence(doc, given)?),
        ..*given
    };
    let mut imported = deepspeed::import(&document, &given)?;
    if precision == Precision::Fp8 {
        let sizes = WorkloadSizes {
            precision,
            ..*imported.workload
        };
        imported.workload = workload(doc, sizes)?;
    }
    if cp > 1 {
        imported.decisions.cp_kind = cp_kind(doc)?;
    }
    Ok(imported)
}

fn with_fsdp(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    let axes = Axes::of(doc, given)?;
    let Axes {
        gpus,
        tp,
        cp,
        ep,
        dp,
    } = axes;
    let sharding = Sharding::of(doc)?;
    let mut notes = Vec::new();
    let offload = fsdp::offload(doc, sharding, &mut notes)?;
    let (dp_shard, dp_replicate) = hf_axes::ranks(doc, given, &axes, sharding, &mut notes)?;
    let micro = micro_batch(doc)?;
    let accumulate = doc.degree("gradient_accumulation_steps")?;
    let precision = precision(doc)?;
    // FSDP reduces them in the type of mixed precision, whichever runtime they are predicted with (accelerate 1.15,
    // `set_mixed_precision` in utils/dataclasses.py). Plain replicas leave them to the runtime.
    let sharded = GradientTypes {
        held: DType::F32,
        reduced: precision.activation(),
    };
    let decisions = Decisions {
        tp,
        cp,
        cp_kind: cp_kind(doc)?,
        ep,
        dp_shard,
        dp_replicate,
        zero: sharding.zero,
        reshard_after_forward: sharding.reshard,
        micro_batch: micro,
        num_micro_batches: accumulate,
        gradients: (sharding.zero == Zero::Z3).then_some(sharded),
        offload,
        prefetch: fsdp::prefetch(doc, &mut notes)?,
        ..Decisions::on_one_gpu(
            given.model.layers,
            overlap(sharding.zero, dp.saturating_mul(cp)),
        )
    };
    let sizes = WorkloadSizes {
        gpus,
        seq_len: sequence(doc, given)?,
        global_batch: micro.saturating_mul(accumulate).saturating_mul(dp),
        precision,
    };
    Imported::new(doc, decisions, sizes, notes)
}

/// What FSDP overlaps with compute; `ranks` ranks share states or gradients.
fn overlap(zero: Zero, ranks: u64) -> Overlap {
    Overlap {
        grad_reduce: ranks > 1,
        param_gather: zero != Zero::Z0,
        tensor_parallel: false,
        pipeline: true,
        expert_parallel: false,
    }
}

/// The kind of context parallelism: axolotl's, or that of accelerate's own configuration.
fn cp_kind(doc: &Document) -> Result<CpKind, ImportError> {
    if doc.dialect != Dialect::Axolotl {
        return of_accelerate(doc);
    }
    let packed = doc.on("sample_packing")?;
    let ring = match doc.text("ring_attn_func")? {
        Some(name) => name.contains("ring"),
        // The default.
        None => !packed,
    };
    Ok(if ring {
        CpKind::Ring
    } else {
        CpKind::AllGather
    })
}

/// accelerate's kind of context parallelism, whose default is to gather (`TorchContextParallelConfig` in its utils/dataclasses.py).
/// PyTorch's other method, `alltoall`, passes keys and values around a ring.
fn of_accelerate(doc: &Document) -> Result<CpKind, ImportError> {
    let key = "parallelism_config.parallelism_config_cp_comm_strategy";
    match doc.text(key)? {
        None | Some("allgather") => Ok(CpKind::AllGather),
        Some("alltoall") => Ok(CpKind::Ring),
        Some(_) => Err(doc.wrong(key, "allgather or alltoall")),
    }
}
