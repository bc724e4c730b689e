//! Reads models from Hugging Face `config.json` files.

mod constants;
mod fields;

use serde_json::Value;

use crate::checked::Model;
use crate::error::SpecError;
use crate::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, ModelConstants, Moe, Norm,
    NormKind, Position, Projections, Residual, WindowPattern,
};
use crate::suggest::nearest_above;
use fields::Fields;

/// Similarity from which an unknown model type counts as misspelt; less similar names are other families.
const ALIKE: f64 = 0.88;

const TYPES: &[&str] = &[
    "gpt2",
    "opt",
    "bloom",
    "gpt_neox",
    "falcon",
    "RefinedWeb",
    "RefinedWebModel",
    "mpt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "nemotron",
    "starcoder2",
];

/// Decodes a `config.json`; `path` is for error messages, `name` for reports.
///
/// # Errors
/// When the model type is unknown, a needed field is missing, or sizes contradict each other.
pub fn decode(text: &str, path: &str, name: &str) -> Result<Model, SpecError> {
    let value: Value = crate::text::json(text, path)?;
    let fields = Fields::new(&value, path)?;
    let kind = fields.text("model_type")?;
    let nested = matches!(kind, "gemma3")
        .then(|| fields.nested("text_config"))
        .flatten();
    let fields = nested.unwrap_or(fields);
    let model = match kind {
        "gpt2" => gpt2(&fields)?,
        "opt" => opt(&fields)?,
        "bloom" => bloom(&fields)?,
        "gpt_neox" => gpt_neox(&fields)?,
        "falcon" | "RefinedWeb" | "RefinedWebModel" => falcon(&fields)?,
        "mpt" => mpt(&fields)?,
        "starcoder2" => starcoder2(&fields)?,
        "llama" | "mistral" | "qwen2" | "qwen3" | "gemma2" | "gemma3" | "gemma3_text" | "phi3"
        | "mixtral" | "qwen2_moe" | "qwen3_moe" | "deepseek_v2" | "deepseek_v3" | "gpt_oss"
        | "nemotron" => llama_like(&fields, kind)?,
        _ => {
            return Err(SpecError::Unknown {
                kind: "model_type",
                name: kind.to_owned(),
                nearest: nearest_above(kind, TYPES, ALIKE),
            });
        }
    };
    let model = ModelConfig {
        name: name.to_owned(),
        stored_as: stored_as(&fields)?,
        constants: constants::decode(&fields, kind)?,
        ..model
    };
    Model::new(model, path)
}

const RMS_NORM: Norm = Norm {
    kind: NormKind::RmsNorm,
    bias: false,
};

const LAYER_NORM: Norm = Norm {
    kind: NormKind::LayerNorm,
    bias: true,
};

/// The fields of a GPT-like block: LayerNorm, biases, GELU, an MLP of four times the width.
fn gpt_base(
    f: &Fields<'_>,
    family: Family,
    hidden: u64,
    layers: u64,
    vocab: u64,
    heads: u64,
    ffn: u64,
) -> Result<ModelConfig, SpecError> {
    let head_dim = head_dim(f, hidden, heads)?;
    Ok(ModelConfig {
        name: String::new(),
        family,
        hidden,
        layers,
        vocab,
        tied_embeddings: true,
        head_bias: false,
        norm: LAYER_NORM,
        embedding_norm: false,
        position: Position::Absent,
        attention: Attention {
            heads,
            kind: AttentionKind::Grouped {
                kv_heads: heads,
                head_dim,
                qk_norm: false,
                projections: Projections::Stacked,
            },
            qkv_bias: true,
            out_bias: true,
            window: WindowPattern::Full,
            sinks: false,
        },
        mlp: Mlp {
            ffn,
            activation: Activation::Gelu,
            gated: false,
            bias: true,
            fused_gate_up: false,
        },
        moe: None,
        residual: Residual::Sequential,
        hidden_dropout: 0.0,
        attention_dropout: 0.0,
        mtp_layers: 0,
        max_position: 2048,
        constants: ModelConstants::default(),
        stored_as: None,
    })
}

/// Dimension of a head; if the file gives none, the hidden size divided by the number of heads.
fn head_dim(f: &Fields<'_>, hidden: u64, heads: u64) -> Result<u64, SpecError> {
    if heads == 0 || hidden.is_multiple_of(heads) {
        return Ok(hidden.checked_div(heads).unwrap_or(0));
    }
    let (below, above) = (hidden / heads * heads, hidden.div_ceil(heads) * heads);
    let message = format!(
        "{hidden} is not divisible by {heads} attention heads; the nearest that are: {below}, {above}"
    );
    Err(f.wrong("hidden size", message))
}

/// The storage format of the published weights, if it is not a type to train in. Planning is for training in
/// `--precision`; weights that only inference can use are refused.
fn stored_as(f: &Fields<'_>) -> Result<Option<String>, SpecError> {
    let Some(quantization) = f.nested("quantization_config") else {
        return Ok(None);
    };
    match quantization.maybe_text("quant_method")? {
        Some(method @ ("fp8" | "mxfp4")) => Ok(Some(method.to_owned())),
        other => {
            let method = other.unwrap_or("an unnamed method");
            let message = format!(
                "weights quantized by {method} are for inference; expected a model to train: a \
                 config.json without quantization_config, or one stored in fp8 or mxfp4"
            );
            Err(f.wrong("quantization_config", message))
        }
    }
}

fn set_projections(model: &mut ModelConfig, how: Projections) {
    if let AttentionKind::Grouped { projections, .. } = &mut model.attention.kind {
        *projections = how;
    }
}

fn gpt2(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let hidden = f.size("n_embd")?;
    let positions = f.size("n_positions")?;
    let ffn = f.maybe("n_inner")?.unwrap_or(4 * hidden);
    let base = gpt_base(
        f,
        Family::Gpt2,
        hidden,
        f.size("n_layer")?,
        f.size("vocab_size")?,
        f.size("n_head")?,
        ffn,
    )?;
    Ok(ModelConfig {
        tied_embeddings: f.flag("tie_word_embeddings", true)?,
        position: Position::Learned { rows: positions },
        hidden_dropout: f.fraction("resid_pdrop")?,
        attention_dropout: f.fraction("attn_pdrop")?,
        max_position: positions,
        ..base
    })
}

fn opt(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let positions = f.size("max_position_embeddings")?;
    let mut base = gpt_base(
        f,
        Family::Opt,
        f.size("hidden_size")?,
        f.size("num_hidden_layers")?,
        f.size("vocab_size")?,
        f.size("num_attention_heads")?,
        f.size("ffn_dim")?,
    )?;
    set_projections(&mut base, Projections::Separate);
    base.mlp.activation = Activation::Relu;
    // The table has two more rows than there are positions.
    base.position = Position::Learned {
        rows: positions + 2,
    };
    base.max_position = positions;
    base.hidden_dropout = f.fraction("dropout")?;
    base.attention_dropout = f.fraction("attention_dropout")?;
    f.only("do_layer_norm_before", true)?;
    if f.maybe("word_embed_proj_dim")?
        .is_some_and(|d| d != base.hidden)
    {
        return Err(f.wrong(
            "word_embed_proj_dim",
            "projections of embeddings are not modelled; expected hidden_size",
        ));
    }
    Ok(base)
}

fn bloom(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let hidden = f.any(&["hidden_size", "n_embed"])?;
    let mut base = gpt_base(
        f,
        Family::Bloom,
        hidden,
        f.any(&["n_layer", "num_hidden_layers"])?,
        f.size("vocab_size")?,
        f.any(&["n_head", "num_attention_heads"])?,
        4 * hidden,
    )?;
    set_projections(&mut base, Projections::Grouped);
    f.only("apply_residual_connection_post_layernorm", false)?;
    Ok(ModelConfig {
        embedding_norm: true,
        position: Position::Alibi,
        hidden_dropout: f.fraction("hidden_dropout")?,
        attention_dropout: f.fraction("attention_dropout")?,
        ..base
    })
}

fn gpt_neox(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let mut base = gpt_base(
        f,
        Family::GptNeox,
        f.size("hidden_size")?,
        f.size("num_hidden_layers")?,
        f.size("vocab_size")?,
        f.size("num_attention_heads")?,
        f.size("intermediate_size")?,
    )?;
    set_projections(&mut base, Projections::Grouped);
    let rope = f.nested("rope_parameters");
    let share = match &rope {
        Some(rope) => rope.real("partial_rotary_factor")?,
        None => f.real("rotary_pct")?,
    };
    let dims = (base.attention.head_dims().0 as f64 * share.unwrap_or(0.25)) as u64;
    f.only("attention_bias", true)?;
    let parallel = f.flag("use_parallel_residual", true)?;
    Ok(ModelConfig {
        tied_embeddings: f.flag("tie_word_embeddings", false)?,
        position: Position::Rope { dims },
        residual: if parallel {
            Residual::Parallel { shared_norm: false }
        } else {
            Residual::Sequential
        },
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(2048),
        ..base
    })
}

fn falcon(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let hidden = f.size("hidden_size")?;
    let heads = f.any(&["num_attention_heads", "n_head"])?;
    let ffn = f.maybe("ffn_hidden_size")?.unwrap_or(4 * hidden);
    let layers = f.any(&["num_hidden_layers", "n_layer"])?;
    let mut base = gpt_base(
        f,
        Family::Falcon,
        hidden,
        layers,
        f.size("vocab_size")?,
        heads,
        ffn,
    )?;
    let new = f.flag("new_decoder_architecture", false)?;
    let shared = if f.flag("multi_query", true)? {
        1
    } else {
        heads
    };
    let kv_heads = if new {
        f.maybe("num_kv_heads")?
            .or(f.maybe("n_head_kv")?)
            .unwrap_or(heads)
    } else {
        shared
    };
    let head_dim = head_dim(f, hidden, heads)?;
    let bias = f.flag("bias", false)?;
    base.attention.kind = AttentionKind::Grouped {
        kv_heads,
        head_dim,
        qk_norm: false,
        projections: Projections::Grouped,
    };
    base.attention.qkv_bias = bias;
    base.attention.out_bias = bias;
    base.mlp.bias = bias;
    base.position = Position::Rope { dims: head_dim };
    base.residual = Residual::Parallel { shared_norm: !new };
    base.tied_embeddings = f.flag("tie_word_embeddings", true)?;
    Ok(base)
}

fn mpt(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let hidden = f.size("d_model")?;
    let ffn = hidden * f.maybe("expansion_ratio")?.unwrap_or(4);
    let mut base = gpt_base(
        f,
        Family::Mpt,
        hidden,
        f.size("n_layers")?,
        f.size("vocab_size")?,
        f.size("n_heads")?,
        ffn,
    )?;
    let bias = !f.flag("no_bias", true)?;
    if let Some(attention) = f.nested("attn_config") {
        attention.only("qk_ln", false)?;
        for field in ["clip_qkv", "softmax_scale"] {
            if attention.real(field)?.is_some() {
                return Err(attention.wrong(field, "is not modelled; expected null"));
            }
        }
    }
    base.norm.bias = bias;
    base.attention.qkv_bias = bias;
    base.attention.out_bias = bias;
    base.mlp.bias = bias;
    base.max_position = f.maybe("max_seq_len")?.unwrap_or(2048);
    base.position = if f
        .nested("attn_config")
        .is_some_and(|a| a.flag("alibi", true).unwrap_or(true))
    {
        Position::Alibi
    } else {
        Position::Learned {
            rows: base.max_position,
        }
    };
    Ok(base)
}

/// StarCoder2: Llama's layout with GPT's parts: LayerNorm, biases, an MLP without gates.
fn starcoder2(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let (hidden, heads) = (f.size("hidden_size")?, f.size("num_attention_heads")?);
    let base = gpt_base(
        f,
        Family::Starcoder2,
        hidden,
        f.size("num_hidden_layers")?,
        f.size("vocab_size")?,
        heads,
        f.size("intermediate_size")?,
    )?;
    let bias = f.flag("use_bias", true)?;
    let attention = llama_attention(f, "starcoder2", heads, hidden)?;
    Ok(ModelConfig {
        tied_embeddings: f.flag("tie_word_embeddings", true)?,
        position: Position::Rope {
            dims: attention.head_dims().0,
        },
        attention: Attention {
            qkv_bias: bias,
            out_bias: bias,
            ..attention
        },
        mlp: Mlp { bias, ..base.mlp },
        hidden_dropout: f.fraction("residual_dropout")?,
        attention_dropout: f.fraction("attention_dropout")?,
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(4096),
        ..base
    })
}

/// Families that share Llama's layout: RMSNorm (or Nemotron's LayerNorm), rotary positions, split projections, gated
/// MLP.
fn llama_like(f: &Fields<'_>, kind: &str) -> Result<ModelConfig, SpecError> {
    let hidden = f.size("hidden_size")?;
    let heads = f.size("num_attention_heads")?;
    let layers = f.size("num_hidden_layers")?;
    let nemotron = kind == "nemotron";
    let gemma = kind.starts_with("gemma");
    let moe = experts(f, kind)?;
    let ffn = match (f.maybe("intermediate_size")?, moe) {
        (Some(ffn), _) => ffn,
        (None, Some(moe)) => moe.expert_ffn,
        (None, None) => f.size("intermediate_size")?,
    };
    let attention = llama_attention(f, kind, heads, hidden)?;
    let rope = match attention.kind {
        AttentionKind::Latent { qk_rope_dim, .. } => qk_rope_dim,
        AttentionKind::Grouped { head_dim, .. } => head_dim,
    };
    Ok(ModelConfig {
        name: String::new(),
        family: family(kind),
        hidden,
        layers,
        vocab: f.size("vocab_size")?,
        tied_embeddings: f.flag("tie_word_embeddings", gemma)?,
        head_bias: false,
        norm: if nemotron { LAYER_NORM } else { RMS_NORM },
        embedding_norm: false,
        position: Position::Rope { dims: rope },
        attention,
        mlp: Mlp {
            ffn,
            activation: match (nemotron, gemma) {
                (true, _) => Activation::Relu2,
                (false, true) => Activation::Gelu,
                (false, false) => Activation::Silu,
            },
            gated: !nemotron,
            bias: f.flag("mlp_bias", false)?,
            fused_gate_up: kind == "phi3",
        },
        moe,
        residual: if gemma {
            Residual::Sandwich
        } else {
            Residual::Sequential
        },
        hidden_dropout: 0.0,
        attention_dropout: f.fraction("attention_dropout")?,
        mtp_layers: f.maybe("num_nextn_predict_layers")?.unwrap_or(0),
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(8192),
        constants: ModelConstants::default(),
        stored_as: None,
    })
}

fn family(kind: &str) -> Family {
    match kind {
        "phi3" => Family::Phi3,
        "mixtral" => Family::Mixtral,
        "qwen2_moe" | "qwen3_moe" => Family::QwenMoe,
        "deepseek_v2" | "deepseek_v3" => Family::DeepSeek,
        "gpt_oss" => Family::GptOss,
        _ => Family::Llama,
    }
}

fn llama_attention(
    f: &Fields<'_>,
    kind: &str,
    heads: u64,
    hidden: u64,
) -> Result<Attention, SpecError> {
    let attention = if kind.starts_with("deepseek") {
        AttentionKind::Latent {
            q_lora_rank: f.maybe("q_lora_rank")?,
            kv_lora_rank: f.size("kv_lora_rank")?,
            qk_nope_dim: f.size("qk_nope_head_dim")?,
            qk_rope_dim: f.size("qk_rope_head_dim")?,
            v_dim: f.size("v_head_dim")?,
        }
    } else {
        AttentionKind::Grouped {
            kv_heads: f.maybe("num_key_value_heads")?.unwrap_or(heads),
            head_dim: match f.maybe("head_dim")? {
                Some(head_dim) => head_dim,
                None => head_dim(f, hidden, heads)?,
            },
            qk_norm: kind.starts_with("qwen3") || kind.starts_with("gemma3"),
            projections: if kind == "phi3" {
                Projections::Stacked
            } else {
                Projections::Separate
            },
        }
    };
    let oss = kind == "gpt_oss";
    let bias = f.flag("attention_bias", oss)?;
    let qwen2 = kind.starts_with("qwen2");
    Ok(Attention {
        heads,
        kind: attention,
        qkv_bias: bias || qwen2,
        out_bias: bias,
        window: window(f, kind)?,
        sinks: oss,
    })
}

fn window(f: &Fields<'_>, kind: &str) -> Result<WindowPattern, SpecError> {
    let used = f.flag("use_sliding_window", true)?;
    let Some(window) = f.maybe("sliding_window")?.filter(|_| used) else {
        return Ok(WindowPattern::Full);
    };
    Ok(match kind {
        "gemma2" | "gpt_oss" => WindowPattern::Alternating { window, period: 2 },
        "gemma3" | "gemma3_text" => {
            let period = f.maybe("sliding_window_pattern")?.unwrap_or(6);
            WindowPattern::Alternating { window, period }
        }
        "mistral" | "mixtral" | "phi3" | "starcoder2" => WindowPattern::All { window },
        _ => WindowPattern::Full,
    })
}

fn experts(f: &Fields<'_>, kind: &str) -> Result<Option<Moe>, SpecError> {
    let none = Moe {
        experts: 0,
        top_k: 0,
        expert_ffn: 0,
        shared_ffn: 0,
        shared_gate: false,
        first_dense: 0,
        every: 1,
        bias: false,
        router_correction_bias: false,
    };
    let moe = match kind {
        "mixtral" | "gpt_oss" => Moe {
            experts: f.size("num_local_experts")?,
            top_k: f.size("num_experts_per_tok")?,
            expert_ffn: f.size("intermediate_size")?,
            bias: kind == "gpt_oss",
            ..none
        },
        "qwen2_moe" | "qwen3_moe" => Moe {
            experts: f.size("num_experts")?,
            top_k: f.size("num_experts_per_tok")?,
            expert_ffn: f.size("moe_intermediate_size")?,
            shared_ffn: f.maybe("shared_expert_intermediate_size")?.unwrap_or(0),
            shared_gate: kind == "qwen2_moe",
            every: f.maybe("decoder_sparse_step")?.unwrap_or(1),
            ..none
        },
        "deepseek_v2" | "deepseek_v3" => {
            let expert_ffn = f.size("moe_intermediate_size")?;
            Moe {
                experts: f.size("n_routed_experts")?,
                top_k: f.size("num_experts_per_tok")?,
                expert_ffn,
                shared_ffn: f.maybe("n_shared_experts")?.unwrap_or(0) * expert_ffn,
                first_dense: f.maybe("first_k_dense_replace")?.unwrap_or(0),
                every: f.maybe("moe_layer_freq")?.unwrap_or(1),
                router_correction_bias: kind == "deepseek_v3",
                ..none
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(moe))
}
