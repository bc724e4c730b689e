//! The model of a Megatron-LM script as a `config.json`, for models that the library lacks. The caller compares the
//! result with the script option by option, so what is missed here is found there.

use serde_json::{Map, Value as Json, json};

use super::document::Document;
use super::error::ImportError;
use super::hub;

/// Rows to which Megatron-LM rounds the vocabulary up, for each tensor-parallel rank.
const DIVISIBLE_BY: u64 = 128;

/// The script's model; `None` if it is of no family that is written here.
pub(super) fn config(doc: &Document) -> Result<Option<Json>, ImportError> {
    let size = |key: &str| doc.size(key).map(|n| n.unwrap_or(0));
    let text =
        |key: &str, usual: &'static str| doc.text(key).map(|t| t.unwrap_or(usual).to_owned());
    let (layers, hidden) = (size("--num-layers")?, size("--hidden-size")?);
    let heads = size("--num-attention-heads")?;
    let rms = text("--normalization", "LayerNorm")? == "RMSNorm";
    let rotates = text("--position-embedding-type", "learned_absolute")? == "rope";
    let (gated, squared) = (on(doc, "--swiglu"), on(doc, "--squared-relu"));
    let biased = !on(doc, "--disable-bias-linear");
    let kind = match (rms && gated && rotates && !biased, squared, gated, rotates) {
        (true, ..) => rotating(doc),
        (_, true, false, true) if !rms && !biased => Some("nemotron"),
        (_, false, false, true) if !rms && biased => Some("gpt_neox"),
        (_, false, false, false) if !rms && biased => Some("gpt2"),
        _ => None,
    };
    let Some(kind) = kind else { return Ok(None) };
    let vocabulary = vocabulary(doc)?;
    let ffn = match size("--ffn-hidden-size")? {
        0 if gated => hidden.saturating_mul(8) / 3 / 64 * 64,
        0 => hidden.saturating_mul(4),
        ffn => ffn,
    };
    let positions = size("--max-position-embeddings")?;
    let tied = !on(doc, "--untie-embeddings-and-output-weights");
    if kind == "gpt2" {
        return Ok(Some(json!({
            "model_type": kind, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn,
            "n_positions": positions, "vocab_size": vocabulary, "tie_word_embeddings": tied,
            "layer_norm_epsilon": number(doc, "--norm-epsilon", 1e-5),
            "resid_pdrop": number(doc, "--hidden-dropout", 0.1),
            "attn_pdrop": number(doc, "--attention-dropout", 0.1),
            "initializer_range": number(doc, "--init-method-std", 0.02),
        })));
    }
    let mut config = Map::new();
    let mut set = |name: &str, value: Json| config.insert(name.to_owned(), value);
    set("model_type", kind.into());
    set("hidden_size", hidden.into());
    set("num_hidden_layers", layers.into());
    set("num_attention_heads", heads.into());
    set("intermediate_size", ffn.into());
    set("vocab_size", vocabulary.into());
    set("max_position_embeddings", positions.into());
    set("tie_word_embeddings", tied.into());
    set(
        "initializer_range",
        number(doc, "--init-method-std", 0.02).into(),
    );
    set("rope_theta", number(doc, "--rotary-base", 10_000.0).into());
    let epsilon = if kind == "nemotron" {
        "norm_eps"
    } else {
        "rms_norm_eps"
    };
    let epsilon = if kind == "gpt_neox" {
        "layer_norm_eps"
    } else {
        epsilon
    };
    set(epsilon, number(doc, "--norm-epsilon", 1e-5).into());
    if on(doc, "--group-query-attention") {
        set("num_key_value_heads", size("--num-query-groups")?.into());
    }
    match size("--kv-channels")? {
        0 => {}
        width => drop(set("head_dim", width.into())),
    }
    let share = number(doc, "--rotary-percent", 1.0);
    match kind {
        "gpt_neox" => {
            set("rotary_pct", share.into());
            set("use_parallel_residual", false.into());
            set("hidden_act", "gelu_new".into());
            set(
                "hidden_dropout",
                number(doc, "--hidden-dropout", 0.1).into(),
            );
            set(
                "attention_dropout",
                number(doc, "--attention-dropout", 0.1).into(),
            );
        }
        "nemotron" => drop(set("partial_rotary_factor", share.into())),
        _ => {}
    }
    if doc.find("--num-experts").is_some() {
        mixture(doc, kind, ffn, &mut config)?;
    }
    Ok(Some(Json::Object(config)))
}

/// The family of a Llama-like script; `None` for latent attention, shared experts and the like.
fn rotating(doc: &Document) -> Option<&'static str> {
    let others = [
        "--multi-latent-attention",
        "--moe-shared-expert-intermediate-size",
        "--mtp-num-layers",
        "--window-size",
        "--use-rope-scaling",
        "--moe-layer-freq",
    ];
    if others.iter().any(|key| doc.find(key).is_some()) {
        return None;
    }
    let experts = doc.find("--num-experts").is_some();
    match (
        on(doc, "--qk-layernorm"),
        on(doc, "--add-qkv-bias"),
        experts,
    ) {
        (true, false, false) => Some("qwen3"),
        (true, false, true) => Some("qwen3_moe"),
        (false, true, false) => Some("qwen2"),
        (false, false, true) => Some("mixtral"),
        (false, false, false) => Some("llama"),
        (true, true, _) | (false, true, true) => None,
    }
}

fn mixture(
    doc: &Document,
    kind: &str,
    ffn: u64,
    config: &mut Map<String, Json>,
) -> Result<(), ImportError> {
    let experts = doc.size("--num-experts")?.unwrap_or(0);
    let chosen = doc.size("--moe-router-topk")?.unwrap_or(2);
    let width = doc.size("--moe-ffn-hidden-size")?.unwrap_or(ffn);
    let mut set = |name: &str, value: u64| config.insert(name.to_owned(), value.into());
    set("num_experts_per_tok", chosen);
    set("num_experts", experts);
    match kind {
        "mixtral" => set("intermediate_size", width),
        _ => set("moe_intermediate_size", width),
    };
    // Scores are the softmax of the chosen experts unless the softmax comes first.
    let normalised = !on(doc, "--moe-router-pre-softmax");
    config.insert("norm_topk_prob".to_owned(), normalised.into());
    Ok(())
}

/// Rows of the embedding table: as said, or the tokenizer's, rounded up.
fn vocabulary(doc: &Document) -> Result<u64, ImportError> {
    if let Some(rows) = doc.size("--padded-vocab-size")? {
        return Ok(rows);
    }
    let said = match (doc.size("--vocab-size")?, doc.text("--tokenizer-type")?) {
        (Some(rows), _) => Some(rows),
        (None, Some("GPT2BPETokenizer")) => Some(50_257),
        (None, Some("Llama2Tokenizer")) => Some(32_000),
        (None, _) => match doc.text("--tokenizer-model")?.and_then(hub::of_library) {
            Some(preset) => return Ok(catalog::load::model(&preset)?.vocab),
            None => None,
        },
    };
    let how = "its rows are the tokenizer's; give --vocab-size in the script, or --model";
    let rows = said.ok_or_else(|| doc.missing("the vocabulary", how))?;
    let unit = doc
        .size("--make-vocab-size-divisible-by")?
        .unwrap_or(DIVISIBLE_BY);
    let unit = unit
        .saturating_mul(doc.degree("--tensor-model-parallel-size")?)
        .max(1);
    Ok(rows.div_ceil(unit).saturating_mul(unit))
}

fn on(doc: &Document, key: &str) -> bool {
    matches!(doc.flag(key), Ok(Some(true)))
}

fn number(doc: &Document, key: &str, usual: f64) -> f64 {
    use crate::config::Value;
    match doc.find(key).map(|node| &node.value) {
        Some(Value::Float(number)) => *number,
        Some(Value::Int(number)) => *number as f64,
        _ => usual,
    }
}
