//! Import of DeepSpeed configurations as strategies.

use catalog::runtime::BUCKET_ELEMENTS;
use catalog::{CpKind, GradientTypes, Offload, Overlap, Precision, WorkloadSizes, Zero};

use super::document::Document;
use super::error::ImportError;
use super::imported::{Given, Imported};
use super::optimizer;
use super::sizes::{data_parallel, micro_batches};
use super::unplanned;
use crate::config::{Node, Value};
use crate::export::deepspeed::{OWN_PREFETCH, PREFETCH};
use plans::decisions::{Decisions, Recompute};

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    let tp = match doc.size("tensor_parallel.autotp_size")? {
        // 0, the default, switches it off (`TPTrainingConfig` in runtime/tensor_parallel/config.py).
        Some(_) => doc.degree_or_unset("tensor_parallel.autotp_size")?,
        None => doc.degree("tensor_parallel.tp.tp_size")?,
    };
    let cp = doc.degree("sequence_parallel_size")?;
    let batch = batch(doc, given, tp.saturating_mul(cp))?;
    let zero = zero(doc)?;
    let (dp_shard, dp_replicate) = match (zero, doc.size("zero_optimization.mics_shard_size")?) {
        (Zero::Z0, _) => (1, batch.dp),
        (Zero::Z3, Some(shard)) if shard > 0 => (shard, data_parallel(doc, batch.dp, shard)?),
        _ => (batch.dp, 1),
    };
    let mut notes = Vec::new();
    let offload = offload(doc, zero, &mut notes)?;
    notes.extend(open(doc)?);
    notes.extend(unplanned::of(doc, &UNPLANNED));
    notes.extend(optimizer(doc)?);
    without_pipeline(doc)?;
    notes.extend(torch_adam(doc, offload)?);
    let overlap = overlap(doc, zero, batch.dp.saturating_mul(cp))?;
    notes.extend(buckets(doc, given, zero, overlap)?);
    let (ep, etp) = experts(doc)?;
    let decisions = Decisions {
        tp,
        cp,
        cp_kind: CpKind::AllToAll,
        ep,
        etp,
        dp_shard,
        dp_replicate,
        zero,
        reshard_after_forward: zero == Zero::Z3,
        micro_batch: batch.micro,
        num_micro_batches: batch.accumulate,
        recompute: recompute(doc, given, &mut notes)?,
        gradients: gradients(doc)?,
        offload,
        prefetch: prefetch(doc, zero, given.model.most_in_layer(tp, ep * etp))?,
        ..Decisions::on_one_gpu(given.model.layers, overlap)
    };
    let sizes = WorkloadSizes {
        gpus: batch.dp.saturating_mul(tp).saturating_mul(cp),
        seq_len: sequence(doc, given)?,
        global_batch: batch.global,
        precision: precision(doc)?,
    };
    Imported::new(doc, decisions, sizes, notes)
}

/// The sequence length that was given.
fn sequence(doc: &Document, given: &Given<'_>) -> Result<u64, ImportError> {
    let how = "DeepSpeed's file has none; give --seq";
    (given.seq_len).ok_or_else(|| doc.missing("the sequence length", how))
}

/// Settings that no plan expresses, and what is predicted in their place. `zero_hpz_partition_size` keeps a second share of
/// the weights within a node; the next two are those of ZeRO++.
const UNPLANNED: [(&[&str], &str); 5] = [
    (
        &["zero_optimization.zero_hpz_partition_size"],
        "the prediction shows less memory and more time, with weights gathered from all ranks in backward too",
    ),
    (
        &["zero_optimization.zero_quantized_weights"],
        "the prediction shows more time, with weights gathered in 16 bits",
    ),
    (
        &["zero_optimization.zero_quantized_gradients"],
        "the prediction shows more time, with gradients reduced in 16 bits",
    ),
    (
        &["bf16.bf16_master_weights_and_grads"],
        "the prediction shows more memory, with weights to update in 32 bits",
    ),
    (
        &["bf16.bf16_optimizer_states"],
        "the prediction shows more memory, with moments in 32 bits",
    ),
];

/// Notes on keys that are `auto`, which the Trainer would fill in, with the values assumed here.
fn open(doc: &Document) -> Result<Vec<String>, ImportError> {
    let micro = "train_micro_batch_size_per_gpu";
    let alone = size(doc, "train_batch_size")?.is_none();
    let bf16 = "bf16.enabled";
    let computes = flag(doc, "fp16.enabled")? != Some(true);
    let open = [
        (micro, alone, "one sequence per micro-batch"),
        (bf16, computes, "on"),
    ];
    let open = open
        .into_iter()
        .filter(|(key, taken, _)| *taken && is_auto(doc, key));
    let notes =
        open.map(|(key, _, value)| format!("{}: {key} is auto: taken as {value}", doc.place(key)));
    Ok(notes.collect())
}

/// A note on an optimizer that is not Adam's.
fn optimizer(doc: &Document) -> Result<Option<String>, ImportError> {
    let key = "optimizer.type";
    let adam = ["auto", "Adam", "AdamW", "FusedAdam", "CPUAdam"];
    let name = doc.text(key)?.filter(|name| {
        let same = |known: &&str| known.eq_ignore_ascii_case(name);
        !adam.iter().any(same)
    });
    Ok(name.map(|name| optimizer::as_adamw(doc, &format!("{key} {name}"))))
}

/// A note on PyTorch's Adam in place of DeepSpeed's own for the host (DeepSpeed, runtime/engine.py,
/// `_configure_basic_optimizer`).
fn torch_adam(doc: &Document, offload: Option<Offload>) -> Result<Option<String>, ImportError> {
    let key = "optimizer.params.torch_adam";
    let told = offload.is_some() && doc.on(key)?;
    let note = "the prediction shows less time: it updates weights on the host by DeepSpeed's CPU Adam, whose kernel reads states once";
    Ok(told.then(|| unplanned::note(doc, &[key], note)))
}

/// Elements of a bucket of gradients unless the file says otherwise (DeepSpeed, runtime/zero/config.py).
const OWN_BUCKET: u64 = 500_000_000;

/// A note on buckets of gradients that are larger than those that are predicted: DeepSpeed allocates one at all levels of ZeRO,
/// and at levels 1 and 2 a second one if reductions run beside backward (runtime/zero/stage_1_and_2.py, `setup_buckets`;
/// stage3.py).
fn buckets(
    doc: &Document,
    given: &Given<'_>,
    zero: Zero,
    overlap: Overlap,
) -> Result<Option<String>, ImportError> {
    let key = "zero_optimization.reduce_bucket_size";
    let hidden = given.model.hidden;
    let elements = match size(doc, key)? {
        Some(elements) => elements,
        // The Trainer's own (transformers, integrations/deepspeed.py, `trainer_config_finalize`).
        None if is_auto(doc, key) => hidden.saturating_mul(hidden),
        None => OWN_BUCKET,
    };
    let allocated =
        zero != Zero::Z0 && flag(doc, "zero_optimization.contiguous_gradients")? != Some(false);
    let count = match zero {
        Zero::Z1 | Zero::Z2 if overlap.grad_reduce => 2,
        _ => 1,
    };
    let beyond = elements.saturating_sub(BUCKET_ELEMENTS);
    let bytes = count * beyond * precision(doc)?.activation().size();
    let shown = catalog::units::Bytes(bytes);
    let by_default = match doc.said(key) {
        None => ", DeepSpeed's own",
        Some(_) => "",
    };
    Ok((allocated && beyond > 0).then(|| {
        doc.note(
            key,
            format!(
                "{key} is {elements} elements{by_default}: its buffers take {shown} more on each GPU than those of {BUCKET_ELEMENTS}, \
                 which are predicted"
            ),
        )
    }))
}

/// Whether the file sets a key to `auto`.
fn is_auto(doc: &Document, key: &str) -> bool {
    doc.find(key).and_then(Node::text) == Some("auto")
}

/// Refuses pipelines, which are not planned from this file.
fn without_pipeline(doc: &Document) -> Result<(), ImportError> {
    let pipeline = "pipeline.stages";
    if matches!(doc.size(pipeline), Ok(Some(2..))) {
        let why = "pipelines of DeepSpeed are made in code; import the plain configuration";
        return Err(doc.unsupported(pipeline, why));
    }
    Ok(())
}

/// An integer; `None` if the key is absent or `auto`.
fn size(doc: &Document, key: &str) -> Result<Option<u64>, ImportError> {
    if is_auto(doc, key) {
        return Ok(None);
    }
    // Numbers of elements are often written as 5e8.
    if let Some(Value::Float(number)) = doc.find(key).map(|node| &node.value)
        && let Ok(whole @ 0..=1_000_000_000_000) = number.to_string().parse::<u64>()
    {
        return Ok(Some(whole));
    }
    doc.size(key)
}

/// A boolean; `None` if the key is absent or `auto`.
fn flag(doc: &Document, key: &str) -> Result<Option<bool>, ImportError> {
    if is_auto(doc, key) {
        return Ok(None);
    }
    doc.flag(key)
}

fn zero(doc: &Document) -> Result<Zero, ImportError> {
    let stage = "zero_optimization.stage";
    let level = doc.size(stage)?.unwrap_or(0);
    let zero = u8::try_from(level)
        .ok()
        .and_then(|level| Zero::try_from(level).ok());
    zero.ok_or_else(|| doc.wrong(stage, "0, 1, 2 or 3"))
}

/// The states that the file keeps in host memory. Adds a note on each setting that no plan has:
/// NVMe, parameters without their optimizer states, a share of the weights. Refuses parameters in host memory whose states are
/// on NVMe: without both, the prediction would hold on the GPU what the job holds nowhere near it.
fn offload(
    doc: &Document,
    zero: Zero,
    notes: &mut Vec<String>,
) -> Result<Option<Offload>, ImportError> {
    let keys = ["offload_optimizer", "offload_param"].map(|key| format!("zero_optimization.{key}"));
    let old = ["cpu_offload", "cpu_offload_param"].map(|key| format!("zero_optimization.{key}"));
    let mut on = [false; 2];
    for ((key, old), on) in keys.iter().zip(&old).zip(&mut on) {
        let device = doc.text(&format!("{key}.device"))?;
        *on = device == Some("cpu") || device.is_none() && flag(doc, old)? == Some(true);
        if device.is_some_and(|device| device != "none" && device != "cpu") {
            notes.push(left_out(doc, key));
        }
    }
    let device = doc.text(&format!("{}.device", keys[0]))?;
    if on[1] && device == Some("nvme") {
        let why = "optimizer states on NVMe are not planned; use cpu for both offloads";
        return Err(doc.unsupported(&keys[0], why));
    }
    let ratio = format!("{}.ratio", keys[0]);
    let said = doc.find(&ratio);
    if said.is_some_and(|node| node.float() != Some(1.0)) {
        notes.push(doc.note(&ratio, "taken as the states of all weights"));
    }
    let offload = match (on, zero) {
        ([true, true], Zero::Z3) => Some(Offload::Parameters),
        ([true, _], Zero::Z1 | Zero::Z2 | Zero::Z3) => Some(Offload::Optimizer(100)),
        _ => None,
    };
    let planned = [offload.is_some(), offload == Some(Offload::Parameters)];
    for ((key, on), planned) in keys.iter().zip(on).zip(planned) {
        if on && !planned {
            notes.push(left_out(doc, key));
        }
    }
    Ok(offload)
}

fn left_out(doc: &Document, key: &str) -> String {
    format!("{}: {key} is not planned for and left out", doc.place(key))
}

struct Batch {
    micro: u64,
    accumulate: u64,
    dp: u64,
    global: u64,
}

/// Solves `train_batch_size = micro · accumulation · dp` for what the file leaves out.
fn batch(doc: &Document, given: &Given<'_>, rest: u64) -> Result<Batch, ImportError> {
    let global_key = "train_batch_size";
    let global = size(doc, global_key)?;
    let key = "train_micro_batch_size_per_gpu";
    let micro = size(doc, key)?.or((is_auto(doc, key) && global.is_none()).then_some(1));
    let accumulate = size(doc, "gradient_accumulation_steps")?;
    let dp = given
        .gpus
        .map(|gpus| data_parallel(doc, gpus, rest))
        .transpose()?;
    let missing = || {
        doc.missing("the batch", "three of train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps and --gpus are needed, as numbers")
    };
    let product = |a: u64, b: u64| a.saturating_mul(b);
    let (micro, accumulate, dp, global) = match (global, micro, accumulate, dp) {
        (Some(g), Some(m), Some(a), None) => {
            (m, a, micro_batches(doc, global_key, g, product(m, a))?, g)
        }
        (Some(g), Some(m), None, Some(d)) => {
            (m, micro_batches(doc, global_key, g, product(m, d))?, d, g)
        }
        (Some(g), None, Some(a), Some(d)) => {
            (micro_batches(doc, global_key, g, product(a, d))?, a, d, g)
        }
        (Some(g), None, None, Some(d)) => (micro_batches(doc, global_key, g, d)?, 1, d, g),
        (None, Some(m), a, Some(d)) => {
            let a = a.unwrap_or(1);
            (m, a, d, product(product(m, a), d))
        }
        (Some(g), Some(m), Some(a), Some(d)) if g == product(product(m, a), d) => (m, a, d, g),
        (Some(g), Some(m), Some(a), Some(d)) => {
            let message = format!("{g} is not micro-batch {m} · accumulation {a} · dp {d}");
            return Err(doc.unsupported(global_key, &message));
        }
        _ => return Err(missing()),
    };
    if micro == 0 || accumulate == 0 || dp == 0 || dp > 1 << 20 {
        return Err(missing());
    }
    Ok(Batch {
        micro,
        accumulate,
        dp,
        global,
    })
}

fn experts(doc: &Document) -> Result<(u64, u64), ImportError> {
    if doc.flag("expert_parallel.enabled")? != Some(true) {
        return Ok((1, 1));
    }
    let ep = doc.degree("expert_parallel.autoep_size")?;
    let etp = doc.degree("expert_parallel.expert_tensor_parallel_size")?;
    Ok((ep, etp))
}

/// Types in which gradients are held and reduced, by default that of parameters; `None` in fp32.
fn gradients(doc: &Document) -> Result<Option<GradientTypes>, ImportError> {
    let computed = match precision(doc)? {
        Precision::Fp32 => return Ok(None),
        precision => precision.activation(),
    };
    let dtype = |key: &str| match doc.text(key)? {
        None | Some("auto") => Ok(computed),
        Some(name) => match GradientTypes::read(name) {
            Some(types) => Ok(types.held),
            None => Err(doc.wrong(key, "fp32, bf16 or fp16")),
        },
    };
    Ok(Some(GradientTypes {
        held: dtype("data_types.grad_accum_dtype")?,
        reduced: dtype("communication_data_type")?,
    }))
}

fn overlap(doc: &Document, zero: Zero, ranks: u64) -> Result<Overlap, ImportError> {
    // DeepSpeed's own default: on for stage 3.
    let comm = flag(doc, "zero_optimization.overlap_comm")?.unwrap_or(zero == Zero::Z3);
    Ok(Overlap {
        grad_reduce: if zero == Zero::Z0 { ranks > 1 } else { comm },
        param_gather: zero != Zero::Z0,
        tensor_parallel: false,
        pipeline: true,
        expert_parallel: false,
    })
}

/// How many layers ahead ZeRO-3 gathers parameters: 2 if the file's number of elements holds two
/// layers of `layer` elements, 0 if it is 0, else `None`, the system's own.
fn prefetch(doc: &Document, zero: Zero, layer: u64) -> Result<Option<u64>, ImportError> {
    let elements = size(doc, PREFETCH)?.filter(|_| zero == Zero::Z3);
    Ok(elements.and_then(|elements| match elements {
        0 => Some(0),
        OWN_PREFETCH => None,
        _ if elements / layer >= 2 => Some(2),
        _ => None,
    }))
}

fn recompute(
    doc: &Document,
    given: &Given<'_>,
    notes: &mut Vec<String>,
) -> Result<Recompute, ImportError> {
    let key = "activation_checkpointing.number_checkpoints";
    match doc.size(key)? {
        Some(n) if n >= given.model.layers => Ok(Recompute::Full),
        Some(n) => Ok(Recompute::Layers(n)),
        None => {
            if doc.find("activation_checkpointing").is_some() {
                let note = "without number_checkpoints, taken as no recomputation";
                notes.push(doc.note("activation_checkpointing", note));
            }
            Ok(Recompute::None)
        }
    }
}

fn precision(doc: &Document) -> Result<Precision, ImportError> {
    let on = |key: &str| flag(doc, key).map(|f| f == Some(true));
    let open = is_auto(doc, "bf16.enabled") && !on("fp16.enabled")?;
    if open || on("bf16.enabled")? {
        return Ok(Precision::Bf16);
    }
    if on("fp16.enabled")? {
        return Ok(Precision::Fp16);
    }
    if on("torch_autocast.enabled")? {
        let dtype = doc.text("torch_autocast.dtype")?.unwrap_or("bfloat16");
        return Ok(if dtype.contains("bfloat16") {
            Precision::Bf16
        } else {
            Precision::Fp16
        });
    }
    Ok(Precision::Fp32)
}
