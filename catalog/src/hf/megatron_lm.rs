//! Reads models that are described by Megatron-LM's options (`megatron/training/arguments.py`), because they belong to no family of the
//! Hugging Face hub. Each field has the name of its option, with underscores. An absent field has Megatron-LM's default.

use super::constants::grown;
use super::fields::Fields;
use super::parts::{LAYER_NORM, RMS_NORM, head_dim, one_of};
use crate::error::SpecError;
use crate::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, ModelConstants, Moe, Position,
    Projections, QkNorm, Rotated, Router, WindowPattern,
};
use crate::rope::RopeScaling;
use crate::window::Window;

pub(super) fn model(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let (hidden, layers) = (f.size("hidden_size")?, f.size("num_layers")?);
    let bias = !f.flag("disable_bias_linear", false)?;
    let mlp = feed_forward(f, hidden, bias)?;
    let moe = match f.maybe("num_experts")? {
        None | Some(0) => None,
        Some(experts) => Some(mixture(f, experts, layers, mlp)?),
    };
    let family = match moe {
        _ if f.flag("multi_latent_attention", false)? => Family::DeepSeek,
        Some(moe) if moe.shared_ffn > 0 || moe.first_dense > 0 => Family::DeepSeek,
        Some(_) if f.flag("qk_layernorm", false)? => Family::QwenMoe,
        Some(_) => Family::Mixtral,
        None if bias => Family::Gpt2,
        None => Family::Llama,
    };
    let attention = attention(f, family, hidden, bias)?;
    Ok(ModelConfig {
        tied_embeddings: !f.flag("untie_embeddings_and_output_weights", false)?,
        norm: match one_of(f, "normalization", &["LayerNorm", "RMSNorm"])? {
            Some("RMSNorm") => RMS_NORM,
            _ => LAYER_NORM,
        },
        position: position(f, &attention)?,
        constants: constants(f, &attention, moe, bias)?,
        attention,
        mlp,
        moe,
        hidden_dropout: f.maybe_fraction("hidden_dropout")?.unwrap_or(0.1),
        attention_dropout: f.maybe_fraction("attention_dropout")?.unwrap_or(0.1),
        mtp_layers: f.maybe("mtp_num_layers")?.unwrap_or(0),
        max_position: f.size("max_position_embeddings")?,
        ..ModelConfig::decoder(family, layers, hidden, f.size("padded_vocab_size")?)
    })
}

fn feed_forward(f: &Fields<'_>, hidden: u64, bias: bool) -> Result<Mlp, SpecError> {
    let swiglu = f.flag("swiglu", false)?;
    let gated = swiglu || f.flag("quick_geglu", false)?;
    let usual = match swiglu {
        // As many weights as without a gate, in multiples of 64.
        true => hidden * 8 / 3 / 64 * 64,
        false => hidden * 4,
    };
    Ok(Mlp {
        ffn: f.maybe("ffn_hidden_size")?.unwrap_or(usual),
        activation: match (gated, f.flag("squared_relu", false)?) {
            (true, _) => Activation::Silu,
            (false, true) => Activation::Relu2,
            (false, false) => Activation::Gelu,
        },
        gated,
        bias,
        fused_gate_up: false,
    })
}

fn attention(
    f: &Fields<'_>,
    family: Family,
    hidden: u64,
    bias: bool,
) -> Result<Attention, SpecError> {
    let heads = f.size("num_attention_heads")?;
    let size = |field: &str, usual: u64| f.maybe(field).map(|size| size.unwrap_or(usual));
    let norm = f.flag("qk_layernorm", false)?;
    let kind = if f.flag("multi_latent_attention", false)? {
        if !norm {
            let message = "latent attention without norms of its ranks is not modelled";
            return Err(f.wrong("qk_layernorm", message));
        }
        AttentionKind::Latent {
            q_lora_rank: f.maybe("q_lora_rank")?,
            kv_lora_rank: size("kv_lora_rank", 32)?,
            qk_nope_dim: size("qk_head_dim", 128)?,
            qk_rope_dim: size("qk_pos_emb_head_dim", 64)?,
            v_dim: size("v_head_dim", 128)?,
        }
    } else {
        AttentionKind::Grouped {
            kv_heads: match f.flag("group_query_attention", false)? {
                true => size("num_query_groups", heads)?,
                false => heads,
            },
            head_dim: match f.maybe("kv_channels")? {
                Some(width) => width,
                None => head_dim(f, hidden, heads)?,
            },
            qk_norm: if norm { QkNorm::Heads } else { QkNorm::Absent },
            projections: match family {
                Family::Gpt2 => Projections::Stacked,
                _ => Projections::Separate,
            },
        }
    };
    Ok(Attention {
        heads,
        kind,
        qkv_bias: bias || f.flag("add_qkv_bias", false)?,
        out_bias: bias,
        window: window(f)?,
        rotated: Rotated::All,
        sinks: one_of(f, "softmax_type", &["vanilla", "learnable"])? == Some("learnable"),
    })
}

/// Clamp value in gpt-oss's gated experts; `None` without quick GeGLU, where a clamp is refused.
fn bounded_glu(f: &Fields<'_>, moe: Option<Moe>) -> Result<Option<f64>, SpecError> {
    let bound = f.real("activation_func_clamp_value")?;
    if !f.flag("quick_geglu", false)? {
        return match bound {
            Some(_) => Err(f.wrong(
                "activation_func_clamp_value",
                "is modelled with --quick-geglu alone",
            )),
            None => Ok(None),
        };
    }
    let everywhere = moe.is_some_and(|moe| moe.is_moe_layer(0) && moe.every == 1);
    if !everywhere || f.not_negative("glu_linear_offset")? != Some(1.0) || bound.is_none() {
        let message = "is modelled with experts in all layers, --glu-linear-offset 1 and --activation-func-clamp-value, as in gpt-oss";
        return Err(f.wrong("quick_geglu", message));
    }
    Ok(bound)
}

/// Which layers attend only to a window of tokens, and how long it is. Megatron-LM's `window_size` does not count the current token;
/// our windows do.
fn window(f: &Fields<'_>) -> Result<WindowPattern, SpecError> {
    let Some(text) = f.maybe_text("window_size")? else {
        return Ok(WindowPattern::Full);
    };
    let sides = text.trim_matches(['(', ')']).split(',');
    let sides: Option<Vec<i64>> = sides.map(|side| side.trim().parse().ok()).collect();
    let window = match sides.as_deref() {
        Some([-1, -1 | 0]) => return Ok(WindowPattern::Full),
        Some([before, 0]) if *before >= 0 => Window::Sliding(before.unsigned_abs() + 1),
        _ => {
            let message = "expected the number of tokens before, and 0 for those after: 1023,0";
            return Err(f.wrong("window_size", message));
        }
    };
    let layers = f.size("num_layers")?;
    let Some(listed) = f.numbers("window_attn_skip_freq")? else {
        return Ok(WindowPattern::All { window });
    };
    let pattern = match (1..).zip(&listed).find(|(_, windowed)| **windowed == 0) {
        None => WindowPattern::All { window },
        Some((period, _)) => WindowPattern::Alternating { window, period },
    };
    let regular = (1..=layers).map(|layer| match pattern {
        WindowPattern::Alternating { period, .. } => u64::from(!layer.is_multiple_of(period)),
        WindowPattern::All { .. } | WindowPattern::Full => 1,
    });
    if !regular.eq(listed) {
        let message =
            format!("expected {layers} layers: groups of n whose last attends to all tokens");
        return Err(f.wrong("window_attn_skip_freq", message));
    }
    Ok(pattern)
}

fn mixture(f: &Fields<'_>, experts: u64, layers: u64, mlp: Mlp) -> Result<Moe, SpecError> {
    let all = vec![1; layers.min(1 << 16) as usize];
    let listed = f.numbers("moe_layer_freq")?.unwrap_or(all);
    let mut at = (0..).zip(&listed).filter(|(_, has)| **has == 1);
    let first = at.next().map_or(layers, |(layer, _)| layer);
    let every = at.next().map_or(1, |(second, _)| second - first);
    let moe = Moe {
        experts,
        top_k: f.maybe("moe_router_topk")?.unwrap_or(2),
        expert_ffn: f.maybe("moe_ffn_hidden_size")?.unwrap_or(mlp.ffn),
        shared_ffn: f.maybe("moe_shared_expert_intermediate_size")?.unwrap_or(0),
        shared_gate: f.flag("moe_shared_expert_gate", false)?,
        first_dense: (first + 1).saturating_sub(every),
        every,
        bias: mlp.bias,
        router_correction_bias: f.flag("moe_router_enable_expert_bias", false)?,
    };
    let regular = (0..layers).map(|layer| u64::from(moe.is_moe_layer(layer)));
    if !regular.eq(listed) {
        let message = format!(
            "expected {layers} layers: dense ones, then groups of n whose last has experts"
        );
        return Err(f.wrong("moe_layer_freq", message));
    }
    Ok(moe)
}

fn position(f: &Fields<'_>, attention: &Attention) -> Result<Position, SpecError> {
    let latent = matches!(attention.kind, AttentionKind::Latent { .. });
    let known: &[&str] = match latent {
        true => &["rope"],
        false => &["learned_absolute", "rope", "yarn", "none"],
    };
    Ok(match one_of(f, "position_embedding_type", known)? {
        Some("rope" | "yarn") => {
            let (head, _) = attention.head_dims();
            let rotated = match attention.kind {
                AttentionKind::Latent { qk_rope_dim, .. } => qk_rope_dim as f64,
                AttentionKind::Grouped { .. } => head as f64,
            };
            let share = f.real("rotary_percent")?.unwrap_or(1.0);
            Position::Rope {
                dims: (rotated * share) as u64,
            }
        }
        Some("none") => Position::Absent,
        _ if latent => {
            let message =
                "latent attention is modelled with rotary positions and no others; expected rope";
            return Err(f.wrong("position_embedding_type", message));
        }
        _ => Position::Learned {
            rows: f.size("max_position_embeddings")?,
        },
    })
}

fn constants(
    f: &Fields<'_>,
    attention: &Attention,
    moe: Option<Moe>,
    bias: bool,
) -> Result<ModelConstants, SpecError> {
    let usual = ModelConstants::default();
    let real = |field: &str, usual: f64| f.real(field).map(|found| found.unwrap_or(usual));
    let latent = matches!(attention.kind, AttentionKind::Latent { .. });
    let rope_scaling = rope_scaling(f, latent)?;
    let (width, _) = attention.head_dims();
    // Latent attention sharpens scores by YaRN's temperature.
    let sharpened = grown(
        real("rotary_scaling_factor", 1.0)?,
        f.not_negative("mscale_all_dim")?.unwrap_or(0.0),
    );
    Ok(ModelConstants {
        norm_epsilon: real("norm_epsilon", usual.norm_epsilon)?,
        rope_theta: real("rotary_base", usual.rope_theta)?,
        rope_scaling,
        attention_scale: latent.then(|| sharpened.powi(2) / (width as f64).sqrt()),
        // GELU is exact unless it is fused with the bias before it.
        gelu_tanh: bias && !f.flag("no_bias_gelu_fusion", false)?,
        norm_from_one: f.flag("apply_layernorm_1p", false)?,
        rope_neighbours: latent || f.flag("rotary_interleaved", false)?,
        router: match moe {
            Some(moe) => router(f, moe.top_k)?,
            None => usual.router,
        },
        bounded_glu: bounded_glu(f, moe)?,
        initializer_range: real("init_method_std", usual.initializer_range)?,
        ..usual
    })
}

fn rope_scaling(f: &Fields<'_>, latent: bool) -> Result<RopeScaling, SpecError> {
    let kind = f.maybe_text("position_embedding_type")?;
    let yarn = match latent {
        true => one_of(f, "rope_type", &["rope", "yarn"])? != Some("rope"),
        false => kind == Some("yarn"),
    };
    // For latent attention, Megatron-LM ignores these options.
    let own = |field: &str, usual: f64| match latent {
        true => Ok(usual),
        false => f.real(field).map(|found| found.unwrap_or(usual)),
    };
    if yarn {
        let factor = f.real("rotary_scaling_factor")?.unwrap_or(1.0);
        let scale = |field: &str, usual: f64| -> Result<f64, SpecError> {
            Ok(grown(factor, f.not_negative(field)?.unwrap_or(usual)))
        };
        return Ok(RopeScaling::Yarn {
            factor,
            original: own("yarn_original_max_position_embeddings", 4096.0)?,
            beta_fast: own("yarn_beta_fast", 32.0)?,
            beta_slow: own("yarn_beta_slow", 1.0)?,
            attention: scale("mscale", 1.0)? / scale("mscale_all_dim", 0.0)?,
            whole_pairs: !f.flag("no_yarn_correction_range_round_to_int", false)?,
        });
    }
    if kind != Some("rope") || latent {
        return Ok(RopeScaling::None);
    }
    let factor = f.real("rotary_seq_len_interpolation_factor")?;
    Ok(match (f.flag("use_rope_scaling", false)?, factor) {
        // pretrain_gpt.py does not hand --rope-scaling-factor to the model.
        (true, _) => RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original: 8192.0,
        },
        (false, Some(factor)) => RopeScaling::Linear { factor },
        (false, None) => RopeScaling::None,
    })
}

fn router(f: &Fields<'_>, top_k: u64) -> Result<Router, SpecError> {
    let score = one_of(f, "moe_router_score_function", &["softmax", "sigmoid"])?;
    let sigmoid = score == Some("sigmoid");
    let first = f.flag("moe_router_pre_softmax", false)?;
    let best = f.maybe("moe_router_group_topk")?.unwrap_or(0);
    // A group's score is the sum of its best experts: two of them under sigmoids, as in DeepSeek-V3, else the best.
    let summed = if sigmoid { 2 } else { 1 };
    if best > 0 && top_k / best != summed {
        let message = format!("groups scored by other than {summed} experts are not modelled");
        return Err(f.wrong("moe_router_group_topk", message));
    }
    if best > 0 && !sigmoid && !first {
        let message = "under softmax, groups are modelled with --moe-router-pre-softmax alone";
        return Err(f.wrong("moe_router_group_topk", message));
    }
    let groups = f.maybe("moe_router_num_groups")?.filter(|_| best > 0);
    Ok(Router {
        sigmoid,
        normalise: match sigmoid {
            true => top_k > 1,
            false => !first,
        },
        scale: f.real("moe_router_topk_scaling_factor")?.unwrap_or(1.0),
        groups: groups.unwrap_or(1),
        best_groups: best.max(1),
        weighs_inputs: false,
    })
}
