//! Import of nanotron's YAML: its model and its strategy.

use catalog::{CpKind, Overlap, Precision, ScheduleKind, WorkloadSizes, Zero};
use serde_json::{Map, Value as Json};

use super::document::Document;
use super::error::ImportError;
use super::imported::{Given, Imported};
use super::unplanned;
use crate::config::{Node, Value};
use crate::export::nanotron::OVERLAP;
use plans::decisions::{Decisions, Recompute};
use plans::partition::StagePartition;

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    let axis = |key: &str| doc.degree(&format!("parallelism.{key}"));
    let (dp, tp, pp) = (axis("dp")?, axis("tp")?, axis("pp")?);
    let (cp, ep) = (
        axis("context_parallel_size")?,
        axis("expert_parallel_size")?,
    );
    if ep > 1 {
        let why = "expert parallelism is an axis of its own there; planned is one within data parallelism";
        return Err(doc.unsupported("parallelism.expert_parallel_size", why));
    }
    let zero = match doc.size("optimizer.zero_stage")?.unwrap_or(0) {
        0 => Zero::Z0,
        1 => Zero::Z1,
        _ => return Err(doc.wrong("optimizer.zero_stage", "0 or 1")),
    };
    let micro_batch = doc.degree("tokens.micro_batch_size")?;
    let count = doc.degree("tokens.batch_accumulation_per_replica")?;
    let overlap = overlap(doc, tp)?;
    let sharded = zero == Zero::Z1;
    let decisions = Decisions {
        tp,
        pp,
        cp,
        cp_kind: CpKind::AllGather,
        dp_shard: if sharded { dp } else { 1 },
        dp_replicate: if sharded { 1 } else { dp },
        zero,
        sequence_parallel: scatters(doc)? && tp > 1,
        micro_batch,
        num_micro_batches: count,
        recompute: match doc.flag("parallelism.recompute_layer")? {
            Some(true) => Recompute::Full,
            _ => Recompute::None,
        },
        schedule: schedule(doc, pp)?,
        stages: StagePartition::even(given.model.layers, pp),
        ..Decisions::on_one_gpu(given.model.layers, overlap)
    };
    let seq_len = doc.size("tokens.sequence_length")?.or(given.seq_len);
    let seq_len = seq_len.ok_or_else(|| doc.missing("the sequence length", "give --seq"))?;
    let sizes = WorkloadSizes {
        gpus: dp.saturating_mul(tp).saturating_mul(pp).saturating_mul(cp),
        seq_len,
        global_batch: micro_batch.saturating_mul(count).saturating_mul(dp),
        precision: precision(doc)?,
    };
    Imported::new(doc, decisions, sizes, notes(doc, pp)?)
}

/// Notes on what is planned differently from what nanotron does.
fn notes(doc: &Document, pp: u64) -> Result<Vec<String>, ImportError> {
    let mut notes = Vec::new();
    let accumulates = "optimizer.accumulate_grad_in_fp32";
    if doc.flag(accumulates)? == Some(false) && precision(doc)? != Precision::Fp32 {
        notes.push(unplanned::in_16_bits(doc, accumulates, "false"));
    }
    if doc.size("optimizer.zero_stage")? == Some(1) {
        notes.push(
            "optimizer.zero_stage 1: nanotron stops with NotImplementedError when it reduces gradients (huggingface/nanotron@2411b02, \
             optim/gradient_accumulator.py, get_fp32_accum_hook)"
                .to_owned(),
        );
    }
    if pp > 1 {
        notes.push("nanotron places layers by their cost; the plan splits them evenly".to_owned());
    }
    Ok(notes)
}

/// Whether tensor-parallel ranks reduce by reduce-scatter, each keeping a part of the sequence. The defaults of this and of
/// the next two are those of `ParallelismArgs` (config/parallelism_config.py, `__post_init__`).
fn scatters(doc: &Document) -> Result<bool, ImportError> {
    let mode = doc.text("parallelism.tp_mode")?;
    Ok(mode.is_some_and(|mode| mode.eq_ignore_ascii_case("REDUCE_SCATTER")))
}

fn overlap(doc: &Document, tp: u64) -> Result<Overlap, ImportError> {
    let asynchronous = doc.on("parallelism.tp_linear_async_communication")?;
    Ok(Overlap {
        tensor_parallel: tp > 1 && asynchronous && scatters(doc)?,
        ..OVERLAP
    })
}

fn schedule(doc: &Document, pp: u64) -> Result<ScheduleKind, ImportError> {
    let key = "parallelism.pp_engine";
    match doc.text(key)? {
        Some("1f1b") => Ok(ScheduleKind::OneFOneB),
        // Without a pipeline there is one order.
        None | Some("afab") if pp == 1 => Ok(ScheduleKind::OneFOneB),
        None | Some("afab") => Ok(ScheduleKind::GPipe),
        Some(_) => Err(doc.wrong(key, "1f1b or afab")),
    }
}

fn precision(doc: &Document) -> Result<Precision, ImportError> {
    let key = "model.dtype";
    match doc.text(key)? {
        None | Some("bfloat16") => Ok(Precision::Bf16),
        Some("float16") => Ok(Precision::Fp16),
        Some("float32") => Ok(Precision::Fp32),
        Some(_) => Err(doc.wrong(key, "bfloat16, float16 or float32")),
    }
}

/// Key under which the file describes its model.
pub(super) const MODEL: &str = "model.model_config";

/// The file's model as a `config.json`; nanotron's own defaults stand for what the file leaves out.
pub(super) fn model(doc: &Document) -> Result<Json, ImportError> {
    let key = |name: &str| format!("{MODEL}.{name}");
    let on = |name: &str| doc.on(&key(name));
    let (llama, qwen) = (on("is_llama_config")?, on("is_qwen2_config")?);
    if !llama && !qwen {
        let why = "only nanotron's Llama and Qwen2 are read: is_llama_config or is_qwen2_config";
        return Err(doc.unsupported(MODEL, why));
    }
    if on("rope_interleaved")? {
        let why = "rotates neighbouring dimensions, as no Llama or Qwen2 of the hub does";
        return Err(doc.unsupported(&key("rope_interleaved"), why));
    }
    if doc.size(&key("no_rope_layer"))?.is_some() {
        let why = "layers without rotation are not modelled";
        return Err(doc.unsupported(&key("no_rope_layer"), why));
    }
    let mut config = Map::new();
    config.insert("rms_norm_eps".to_owned(), 1e-6.into());
    config.insert("max_position_embeddings".to_owned(), 2048.into());
    // As many as query heads.
    config.insert("num_key_value_heads".to_owned(), Json::Null);
    for (name, node) in doc.find(MODEL).map_or(&[][..], Node::entries) {
        if SAME.contains(&name.as_str()) {
            config.insert(name.clone(), json(&node.value));
        }
    }
    let mut set = |name: &str, value: Json| config.insert(name.to_owned(), value);
    let experts = doc
        .find(&key("moe_config"))
        .is_some_and(|node| !node.entries().is_empty());
    if qwen {
        let biased = on("attention_bias")?;
        set("qkv_bias", biased.into());
        if let Some(window) = doc.size(&key("sliding_window_size"))? {
            set("sliding_window", window.into());
            set("use_sliding_window", true.into());
            set("max_window_layers", 0.into());
        }
        let factor = doc.find(&key("rope_seq_len_interpolation_factor"));
        if let Some(factor) = factor.filter(|node| node.value != Value::Null) {
            let scaling = serde_json::json!({"rope_type": "linear", "factor": json(&factor.value)});
            set("rope_scaling", scaling);
        }
    }
    if llama && on("attention_bias")? {
        set("attention_bias", true.into());
    }
    let kind = match (llama, experts) {
        (true, _) => "llama",
        (false, true) => "qwen2_moe",
        (false, false) => "qwen2",
    };
    set("model_type", kind.into());
    if experts && qwen {
        mixture(doc, &mut config)?;
    }
    Ok(Json::Object(config))
}

/// Fields that have the same name and meaning in nanotron and in a `config.json`.
const SAME: [&str; 13] = [
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

fn mixture(doc: &Document, config: &mut Map<String, Json>) -> Result<(), ImportError> {
    let key = |name: &str| format!("{MODEL}.moe_config.{name}");
    let size = |name: &str, usual: u64| doc.size(&key(name)).map(|n| n.unwrap_or(usual));
    let layers = doc.find(&key("layers")).and_then(Node::list);
    let all = doc.size(&format!("{MODEL}.num_hidden_layers"))?;
    let whole = layers.is_none_or(|list| {
        matches!(list, [one] if one.int() == Some(-1)) || Some(list.len() as u64) == all
    });
    if !whole {
        let why = "mixtures of experts in some layers only are not read";
        return Err(doc.unsupported(&key("layers"), why));
    }
    let mut set = |name: &str, value: u64| config.insert(name.to_owned(), value.into());
    set("num_experts", size("num_experts", 8)?);
    set("num_experts_per_tok", size("top_k", 2)?);
    set(
        "moe_intermediate_size",
        size("moe_intermediate_size", 1408)?,
    );
    let shared = match doc.on(&key("enable_shared_expert"))? {
        true => size("shared_expert_intermediate_size", 5632)?,
        false => 0,
    };
    set("shared_expert_intermediate_size", shared);
    Ok(())
}

/// A value as JSON; calls and expressions, which JSON cannot hold, become null.
pub(super) fn json(value: &Value) -> Json {
    match value {
        Value::Null | Value::Call(..) | Value::Expression(_) => Json::Null,
        Value::Bool(on) => (*on).into(),
        Value::Int(number) => (*number).into(),
        Value::Float(number) => (*number).into(),
        Value::Str(text) => text.clone().into(),
        Value::List(items) => items.iter().map(|item| json(&item.value)).collect(),
        Value::Table(entries) => {
            let fields = entries.iter();
            let fields = fields.map(|(key, node)| (key.clone(), json(&node.value)));
            Json::Object(fields.collect())
        }
    }
}
