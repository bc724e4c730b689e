//! Families that share Llama's layout: RMSNorm (or Nemotron's LayerNorm), rotary positions, split projections, a gated
//! MLP or experts.

use super::fields::Fields;
use super::parts::{LAYER_NORM, RMS_NORM, head_dim, one_of, rotated};
use super::windows;
use crate::error::SpecError;
use crate::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, Moe, Projections, QkNorm,
    Residual, Rotated,
};

/// Decodes a model of one of these families; `kind` is its `model_type`.
pub(super) fn model(f: &Fields<'_>, kind: &str) -> Result<ModelConfig, SpecError> {
    let hidden = f.size("hidden_size")?;
    let heads = f.size("num_attention_heads")?;
    let layers = f.size("num_hidden_layers")?;
    let nemotron = kind == "nemotron";
    let gemma = kind.starts_with("gemma");
    let moe = experts(f, kind)?;
    let ffn = match (f.usual("intermediate_size")?, moe) {
        _ if family(kind) == Family::Llama4 => f.size("intermediate_size_mlp")?,
        (Some(ffn), _) => ffn,
        (None, Some(moe)) => moe.expert_ffn,
        (None, None) => f.size("intermediate_size")?,
    };
    let attention = attention(f, kind, heads, hidden)?;
    let position = rotated(f, kind, &attention)?;
    Ok(ModelConfig {
        tied_embeddings: f.flag("tie_word_embeddings", gemma || kind == "ernie4_5_moe")?,
        norm: if nemotron { LAYER_NORM } else { RMS_NORM },
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
            bias: match kind {
                "ernie4_5_moe" => f.flag("use_bias", false)?,
                _ => f.flag("mlp_bias", false)?,
            },
            fused_gate_up: kind == "phi3",
        },
        moe,
        residual: residual(kind),
        hidden_dropout: match kind {
            "phi3" => f.same_fraction(&["resid_pdrop", "embd_pdrop"])?,
            _ => 0.0,
        },
        attention_dropout: f.fraction("attention_dropout")?,
        mtp_layers: predictors(f, kind)?,
        max_position: f.usual("max_position_embeddings")?.unwrap_or(8192),
        ..ModelConfig::decoder(family(kind), layers, hidden, f.size("vocab_size")?)
    })
}

/// Where a layer's norms are.
fn residual(kind: &str) -> Residual {
    match kind {
        "olmo2" | "olmo3" => Residual::After,
        kind if kind.starts_with("gemma") => Residual::Sandwich,
        _ => Residual::Sequential,
    }
}

fn family(kind: &str) -> Family {
    match kind {
        "phi3" => Family::Phi3,
        "mixtral" => Family::Mixtral,
        "minimax_m2" => Family::MiniMax,
        "ernie4_5_moe" => Family::Ernie,
        "llama4" | "llama4_text" => Family::Llama4,
        "qwen2_moe" | "qwen3_moe" | "qwen3_next" => Family::QwenMoe,
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
            q_lora_rank: f.usual("q_lora_rank")?,
            kv_lora_rank: f.size("kv_lora_rank")?,
            qk_nope_dim: f.size("qk_nope_head_dim")?,
            qk_rope_dim: f.size("qk_rope_head_dim")?,
            v_dim: f.size("v_head_dim")?,
        }
    } else {
        AttentionKind::Grouped {
            kv_heads: f.usual("num_key_value_heads")?.unwrap_or(heads),
            head_dim: match f.usual("head_dim")? {
                Some(head_dim) => head_dim,
                None => head_dim(f, hidden, heads)?,
            },
            qk_norm: qk_norm(f, kind)?,
            projections: if kind == "phi3" {
                Projections::Stacked
            } else {
                Projections::Separate
            },
        }
    };
    let oss = kind == "gpt_oss";
    let bias = match kind {
        "ernie4_5_moe" => f.flag("use_bias", false)?,
        _ => f.flag("attention_bias", oss)?,
    };
    let qkv_bias = bias || kind.starts_with("qwen2") && f.flag("qkv_bias", true)?;
    Ok(Attention {
        heads,
        kind: attention,
        qkv_bias,
        // GLM-4.5's output projection has no bias, whatever the file says.
        out_bias: bias && kind != "glm4_moe",
        window: windows::pattern(f, kind)?,
        rotated: match kind {
            "llama4" | "llama4_text" => Rotated::Windowed,
            _ => Rotated::All,
        },
        sinks: oss,
    })
}

fn qk_norm(f: &Fields<'_>, kind: &str) -> Result<QkNorm, SpecError> {
    Ok(match kind {
        "olmo2" | "olmo3" => QkNorm::Whole,
        "minimax_m2" => {
            f.only("use_qk_norm", true)?;
            one_of(f, "qk_norm_type", &["per_layer"])?;
            let kinds = f.numbers("attn_type_list")?.unwrap_or_default();
            if kinds.iter().any(|&kind| kind != 1) {
                let message = "linear attention is not modelled; expected 1 for every layer";
                return Err(f.wrong("attn_type_list", message));
            }
            QkNorm::Whole
        }
        "glm4_moe" if f.flag("use_qk_norm", false)? => QkNorm::Heads,
        "llama4" | "llama4_text" if f.flag("use_qk_norm", true)? => QkNorm::Unweighted,
        "qwen3" | "qwen3_moe" | "qwen3_next" => {
            f.only("use_qk_norm", true)?;
            QkNorm::Heads
        }
        "gemma3" | "gemma3_text" => QkNorm::Heads,
        _ => QkNorm::Absent,
    })
}

/// Number of multi-token-prediction layers, which files give under several names.
fn predictors(f: &Fields<'_>, kind: &str) -> Result<u64, SpecError> {
    if kind == "minimax_m2" {
        let modules = f.maybe("num_mtp_modules")?.unwrap_or(0);
        let layers = f.maybe("mtp_transformer_layers")?.unwrap_or(1);
        let used = f.flag("use_mtp", false)?;
        if used && modules > 0 && layers != 1 {
            let message = format!("{layers} layers in a module are not modelled; expected 1");
            return Err(f.wrong("mtp_transformer_layers", message));
        }
        return Ok(if used { modules } else { 0 });
    }
    let named = f.maybe("num_nextn_predict_layers")?;
    Ok(named.or(f.maybe("num_mtp_layers")?).unwrap_or(0))
}

fn experts(f: &Fields<'_>, kind: &str) -> Result<Option<Moe>, SpecError> {
    let moe = match kind {
        "mixtral" | "gpt_oss" | "minimax_m2" => Moe {
            bias: kind == "gpt_oss",
            router_correction_bias: kind == "minimax_m2",
            ..Moe::routed(
                f.any(&["num_local_experts", "num_experts"])?,
                f.size("num_experts_per_tok")?,
                f.size("intermediate_size")?,
            )
        },
        "llama4" | "llama4_text" => of_llama4(f)?,
        "ernie4_5_moe" => of_ernie(f)?,
        "qwen2_moe" | "qwen3_moe" | "qwen3_next" => Moe {
            shared_ffn: f.usual("shared_expert_intermediate_size")?.unwrap_or(0),
            shared_gate: matches!(kind, "qwen2_moe" | "qwen3_next"),
            every: f.maybe("decoder_sparse_step")?.unwrap_or(1),
            ..Moe::routed(
                f.any(&["num_experts", "num_local_experts"])?,
                f.size("num_experts_per_tok")?,
                f.size("moe_intermediate_size")?,
            )
        },
        "deepseek_v2" | "deepseek_v3" | "glm4_moe" => {
            let expert_ffn = f.size("moe_intermediate_size")?;
            let (experts, top_k) = (f.size("n_routed_experts")?, f.size("num_experts_per_tok")?);
            Moe {
                shared_ffn: f.usual("n_shared_experts")?.unwrap_or(0) * expert_ffn,
                first_dense: f.usual("first_k_dense_replace")?.unwrap_or(0),
                every: f.maybe("moe_layer_freq")?.unwrap_or(1),
                router_correction_bias: kind != "deepseek_v2",
                ..Moe::routed(experts, top_k, expert_ffn)
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(moe))
}

/// Llama 4's distance between layers with experts, from a number or a list of layers.
fn interleaved(f: &Fields<'_>) -> Result<u64, SpecError> {
    let step = f.maybe("interleave_moe_layer_step")?.unwrap_or(1);
    let layers = f.size("num_hidden_layers")?;
    let Some(listed) = f.numbers("moe_layers")? else {
        return Ok(step);
    };
    let step = listed.first().map_or(0, |first| first + 1);
    let regular = |step: u64| (1..=layers).filter(move |layer| layer.is_multiple_of(step));
    if step == 0 || !regular(step).eq(listed.iter().map(|layer| layer + 1)) {
        let message = "expected every n-th layer to have experts";
        return Err(f.wrong("moe_layers", message));
    }
    Ok(step)
}

/// The index of ERNIE's first layer with experts. All layers after it have experts too.
fn last_layers(f: &Fields<'_>) -> Result<u64, SpecError> {
    let layers = f.size("num_hidden_layers")?;
    let whole = |field: &str, said: Option<u64>, usual: u64| match said {
        Some(other) if other != usual => {
            let message = format!("{other} is not modelled; expected {usual}");
            Err(f.wrong(field, message))
        }
        _ => Ok(()),
    };
    let interval = f.maybe("moe_layer_interval")?;
    whole("moe_layer_interval", interval, 1)?;
    let end = f.layer("moe_layer_end_index", layers)?;
    whole("moe_layer_end_index", end, layers.saturating_sub(1))?;
    Ok(f.maybe("moe_layer_start_index")?.unwrap_or(1))
}

fn of_llama4(f: &Fields<'_>) -> Result<Moe, SpecError> {
    let expert_ffn = f.size("intermediate_size")?;
    let experts = f.any(&["num_local_experts", "num_experts"])?;
    let top_k = f.maybe("num_experts_per_tok")?.unwrap_or(1);
    Ok(Moe {
        shared_ffn: expert_ffn,
        every: interleaved(f)?,
        ..Moe::routed(experts, top_k, expert_ffn)
    })
}

fn of_ernie(f: &Fields<'_>) -> Result<Moe, SpecError> {
    let expert_ffn = f.size("moe_intermediate_size")?;
    Ok(Moe {
        shared_ffn: f.maybe("moe_num_shared_experts")?.unwrap_or(2) * expert_ffn,
        first_dense: last_layers(f)?,
        router_correction_bias: true,
        ..Moe::routed(f.size("moe_num_experts")?, f.size("moe_k")?, expert_ffn)
    })
}
