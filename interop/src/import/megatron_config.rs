//! Builds a `config.json` from the options of a Megatron-LM script, for models that the library lacks. The caller
//! compares the result with the script option by option, so an option that is missed here is found there.

use serde_json::{Map, Value as Json};

use super::document::Document;
use super::error::ImportError;
use super::hub;

/// Megatron-LM's default for rounding the vocabulary up: to a multiple of this times the tensor-parallel size.
pub(super) const DIVISIBLE_BY: u64 = 128;

/// The `config.json` of the script's model; `None` if its family is not among those written here.
pub(super) fn config(doc: &Document) -> Result<Option<Json>, ImportError> {
    let Some(kind) = family(doc)? else {
        return Ok(None);
    };
    let size = |key: &str| doc.size(key).map(|n| n.unwrap_or(0));
    let hidden = size("--hidden-size")?;
    let ffn = match size("--ffn-hidden-size")? {
        0 if on(doc, "--swiglu") => hidden.saturating_mul(8) / 3 / 64 * 64,
        0 => hidden.saturating_mul(4),
        ffn => ffn,
    };
    let own = sizes(kind);
    let mut config = Map::new();
    let mut set = |name: &str, value: Json| config.insert(name.to_owned(), value);
    set("model_type", kind.into());
    set(own.hidden, hidden.into());
    set(own.layers, size("--num-layers")?.into());
    set(own.heads, size("--num-attention-heads")?.into());
    set(own.ffn, ffn.into());
    set(own.positions, size("--max-position-embeddings")?.into());
    set(own.epsilon, number(doc, "--norm-epsilon", 1e-5).into());
    set("vocab_size", vocabulary(doc)?.into());
    let tied = !on(doc, "--untie-embeddings-and-output-weights");
    set("tie_word_embeddings", tied.into());
    let deviation = number(doc, "--init-method-std", 0.02);
    set("initializer_range", deviation.into());
    for (name, option) in own.dropout {
        set(name, number(doc, option, 0.1).into());
    }
    if kind != "gpt2" {
        set("rope_theta", number(doc, "--rotary-base", 10_000.0).into());
        let share = number(doc, "--rotary-percent", 1.0);
        set(own.share, share.into());
    }
    if kind == "gpt_neox" {
        set("use_parallel_residual", false.into());
        set("hidden_act", "gelu_new".into());
    }
    if on(doc, "--group-query-attention") {
        set("num_key_value_heads", size("--num-query-groups")?.into());
    }
    if let Some(width) = doc.size("--kv-channels")? {
        set("head_dim", width.into());
    }
    if doc.find("--num-experts").is_some() {
        mixture(doc, kind, ffn, &mut config)?;
    }
    Ok(Some(Json::Object(config)))
}

/// How a family's `config.json` names the fields.
struct Names {
    hidden: &'static str,
    layers: &'static str,
    heads: &'static str,
    ffn: &'static str,
    positions: &'static str,
    epsilon: &'static str,
    /// Field with the share of a head's dimensions that is rotated.
    share: &'static str,
    /// Fields with dropout probabilities, each with Megatron-LM's option.
    dropout: &'static [(&'static str, &'static str)],
}

fn sizes(kind: &str) -> Names {
    let llama = Names {
        hidden: "hidden_size",
        layers: "num_hidden_layers",
        heads: "num_attention_heads",
        ffn: "intermediate_size",
        positions: "max_position_embeddings",
        epsilon: "rms_norm_eps",
        share: "partial_rotary_factor",
        dropout: &[],
    };
    match kind {
        "gpt2" => Names {
            hidden: "n_embd",
            layers: "n_layer",
            heads: "n_head",
            ffn: "n_inner",
            positions: "n_positions",
            epsilon: "layer_norm_epsilon",
            dropout: &[
                ("resid_pdrop", "--hidden-dropout"),
                ("attn_pdrop", "--attention-dropout"),
            ],
            ..llama
        },
        "gpt_neox" => Names {
            epsilon: "layer_norm_eps",
            share: "rotary_pct",
            dropout: &[
                ("hidden_dropout", "--hidden-dropout"),
                ("attention_dropout", "--attention-dropout"),
            ],
            ..llama
        },
        "nemotron" => Names {
            epsilon: "norm_eps",
            ..llama
        },
        _ => llama,
    }
}

/// The `model_type` of the script's model; `None` if it is not written here.
fn family(doc: &Document) -> Result<Option<&'static str>, ImportError> {
    let rms = doc.text("--normalization")? == Some("RMSNorm");
    let rotates = doc.text("--position-embedding-type")? == Some("rope");
    let (gated, squared) = (on(doc, "--swiglu"), on(doc, "--squared-relu"));
    let biased = !on(doc, "--disable-bias-linear");
    Ok(match (rms, gated, rotates, biased) {
        (true, true, true, false) => rotating(doc),
        (false, false, true, false) if squared => Some("nemotron"),
        (false, false, true, true) if !squared => Some("gpt_neox"),
        (false, false, false, true) if !squared => Some("gpt2"),
        _ => None,
    })
}

/// The `model_type` of a script with Llama's parts; `None` for latent attention, shared experts and the like.
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

/// Rows of the embedding table: as stated, or the tokenizer's, rounded up as Megatron-LM does.
fn vocabulary(doc: &Document) -> Result<u64, ImportError> {
    if let Some(rows) = doc.size("--padded-vocab-size")? {
        return Ok(rows);
    }
    let said = match doc.size("--vocab-size")? {
        Some(rows) => Some(rows),
        None => implied_vocabulary(doc)?,
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

/// Rows of the tokenizer that the script names.
pub(super) fn implied_vocabulary(doc: &Document) -> Result<Option<u64>, ImportError> {
    Ok(match doc.text("--tokenizer-type")? {
        Some("GPT2BPETokenizer") => Some(50_257),
        Some("Llama2Tokenizer") => Some(32_000),
        _ => match doc.text("--tokenizer-model")?.and_then(hub::of_library) {
            Some(preset) => Some(catalog::load::model(&preset)?.vocab),
            None => None,
        },
    })
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
