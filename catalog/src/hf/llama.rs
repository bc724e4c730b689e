//! Families that share Llama's layout: RMSNorm (or Nemotron's LayerNorm), rotary positions, split projections, a gated
//! MLP or experts.

use super::fields::Fields;
use super::parts::{LAYER_NORM, RMS_NORM, head_dim, rotated};
use crate::error::SpecError;
use crate::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, ModelConstants, Moe,
    Projections, Residual, WindowPattern,
};

/// Decodes a model of one of these families; `kind` is its `model_type`.
pub(super) fn model(f: &Fields<'_>, kind: &str) -> Result<ModelConfig, SpecError> {
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
    let attention = attention(f, kind, heads, hidden)?;
    let position = rotated(f, kind, &attention)?;
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
        position,
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
        hidden_dropout: match kind {
            "phi3" => f.same_fraction(&["resid_pdrop", "embd_pdrop"])?,
            _ => 0.0,
        },
        attention_dropout: f.fraction("attention_dropout")?,
        mtp_layers: predictors(f)?,
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(8192),
        constants: ModelConstants::default(),
        stored_as: None,
        adapters: None,
    })
}

fn family(kind: &str) -> Family {
    match kind {
        "phi3" => Family::Phi3,
        "mixtral" => Family::Mixtral,
        "qwen2_moe" | "qwen3_moe" => Family::QwenMoe,
        "deepseek_v2" | "deepseek_v3" | "glm4_moe" => Family::DeepSeek,
        "gpt_oss" => Family::GptOss,
        _ => Family::Llama,
    }
}

pub(super) fn attention(
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
            head_dim: match f.maybe_or("head_dim", usual_head_dim(kind))? {
                Some(head_dim) => head_dim,
                None => head_dim(f, hidden, heads)?,
            },
            qk_norm: match kind {
                "glm4_moe" => f.flag("use_qk_norm", false)?,
                _ => kind.starts_with("qwen3") || kind.starts_with("gemma3"),
            },
            projections: if kind == "phi3" {
                Projections::Stacked
            } else {
                Projections::Separate
            },
        }
    };
    let oss = kind == "gpt_oss";
    let bias = f.flag("attention_bias", oss)?;
    let qkv_bias = bias || kind.starts_with("qwen2") && f.flag("qkv_bias", true)?;
    Ok(Attention {
        heads,
        kind: attention,
        qkv_bias,
        // GLM-4.5's output projection has no bias, whatever the file says.
        out_bias: bias && kind != "glm4_moe",
        window: window(f, kind)?,
        sinks: oss,
    })
}

/// Dimension of a head where the file leaves it out and the family does not divide the hidden size by the heads.
fn usual_head_dim(kind: &str) -> Option<u64> {
    match kind {
        "gemma2" | "gemma3" | "gemma3_text" => Some(256),
        "qwen3" => Some(128),
        "gpt_oss" => Some(64),
        _ => None,
    }
}

/// Number of multi-token-prediction layers, which files give under two names.
fn predictors(f: &Fields<'_>) -> Result<u64, SpecError> {
    let named = f.maybe("num_nextn_predict_layers")?;
    Ok(named.or(f.maybe("num_mtp_layers")?).unwrap_or(0))
}

fn window(f: &Fields<'_>, kind: &str) -> Result<WindowPattern, SpecError> {
    let usual = match kind {
        "gemma2" | "gemma3" | "gemma3_text" | "mistral" => Some(4096),
        "gpt_oss" => Some(128),
        _ => None,
    };
    let qwen = kind.starts_with("qwen");
    let window = f.maybe_or("sliding_window", usual)?;
    let used = !qwen || f.flag("use_sliding_window", false)?;
    let layers = f.maybe("num_hidden_layers")?.unwrap_or(0);
    // The layers before this one attend to everything.
    let first = f.maybe("max_window_layers")?.filter(|_| qwen);
    let named = f.texts("layer_types")?;
    let period = f.maybe("sliding_window_pattern")?.unwrap_or(6);
    let Some(window) = window.filter(|_| used) else {
        return Ok(WindowPattern::Full);
    };
    if let Some(named) = named {
        return of_layers(f, &named, layers, window);
    }
    Ok(match kind {
        "gemma2" | "gpt_oss" => WindowPattern::Alternating { window, period: 2 },
        "gemma3" | "gemma3_text" => WindowPattern::Alternating { window, period },
        "mistral" | "mixtral" | "phi3" | "starcoder2" => WindowPattern::All { window },
        _ if qwen => match first.unwrap_or(28) {
            0 => WindowPattern::All { window },
            first if first >= layers => WindowPattern::Full,
            _ => {
                let message =
                    "windows in the last layers only are not modelled; expected 0, or all layers";
                return Err(f.wrong("max_window_layers", message));
            }
        },
        _ => WindowPattern::Full,
    })
}

/// The window pattern of a list that names each layer's attention (`layer_types`); fails if no pattern fits it.
fn of_layers(
    f: &Fields<'_>,
    named: &[&str],
    layers: u64,
    window: u64,
) -> Result<WindowPattern, SpecError> {
    let wrong = |message: &str| Err(f.wrong("layer_types", message));
    if named.len() as u64 != layers {
        return wrong("expected as many entries as num_hidden_layers");
    }
    if named
        .iter()
        .any(|name| !["full_attention", "sliding_attention"].contains(name))
    {
        return wrong("layers other than full_attention and sliding_attention are not modelled");
    }
    let full: Vec<bool> = named.iter().map(|name| *name == "full_attention").collect();
    let Some(first) = full.iter().position(|full| *full) else {
        return Ok(WindowPattern::All { window });
    };
    if !full.contains(&false) {
        return Ok(WindowPattern::Full);
    }
    let period = first + 1;
    let mut layers = full.iter().enumerate();
    let regular = layers.all(|(i, full)| *full == (i + 1).is_multiple_of(period));
    if !regular {
        return wrong(
            "expected every n-th layer to attend to everything, and the others to have a window",
        );
    }
    let period = period as u64;
    Ok(WindowPattern::Alternating { window, period })
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
            experts: f.any(&["num_local_experts", "num_experts"])?,
            top_k: f.size("num_experts_per_tok")?,
            expert_ffn: f.size("intermediate_size")?,
            bias: kind == "gpt_oss",
            ..none
        },
        "qwen2_moe" | "qwen3_moe" => Moe {
            experts: f.any(&["num_experts", "num_local_experts"])?,
            top_k: f.size("num_experts_per_tok")?,
            expert_ffn: f.size("moe_intermediate_size")?,
            shared_ffn: f.maybe("shared_expert_intermediate_size")?.unwrap_or(0),
            shared_gate: kind == "qwen2_moe",
            every: f.maybe("decoder_sparse_step")?.unwrap_or(1),
            ..none
        },
        "deepseek_v2" | "deepseek_v3" | "glm4_moe" => {
            let expert_ffn = f.size("moe_intermediate_size")?;
            Moe {
                experts: f.size("n_routed_experts")?,
                top_k: f.size("num_experts_per_tok")?,
                expert_ffn,
                shared_ffn: f.maybe("n_shared_experts")?.unwrap_or(0) * expert_ffn,
                first_dense: f.maybe("first_k_dense_replace")?.unwrap_or(0),
                every: f.maybe("moe_layer_freq")?.unwrap_or(1),
                router_correction_bias: kind != "deepseek_v2",
                ..none
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(moe))
}
