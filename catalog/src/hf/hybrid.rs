//! Hybrid families: Nemotron-H, with layers of Mamba-2, attention, feed-forward blocks or experts,
//! and Qwen3-Next, whose layers have a gated delta net or gated attention before their experts.

use super::fields::Fields;
use super::llama;
use crate::error::SpecError;
use crate::hybrid::{GatedDelta, Hybrid, LayerKind, Recurrence, StateSpace};
use crate::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, Moe, Projections, QkNorm,
    Rotated, WindowPattern,
};

/// Decodes a model of the type `nemotron_h`. Its attention has no positional encoding.
pub(super) fn nemotron_h(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let layers = nemotron_layers(f)?;
    let moe = nemotron_experts(f, layers.contains(&LayerKind::Experts))?;
    refused(f)?;
    let ffn = f.maybe("intermediate_size")?.unwrap_or(21_504);
    let (count, hidden) = (layers.len() as u64, f.size("hidden_size")?);
    Ok(ModelConfig {
        tied_embeddings: f.flag("tie_word_embeddings", false)?,
        attention: nemotron_attention(f)?,
        mlp: Mlp {
            ffn,
            activation: Activation::Relu2,
            gated: false,
            bias: f.flag("mlp_bias", false)?,
            fused_gate_up: false,
        },
        moe,
        hybrid: Some(Hybrid {
            layers,
            recurrence: Recurrence::StateSpace(state_space(f)?),
            gated_attention: false,
        }),
        attention_dropout: f.fraction("attention_dropout")?,
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(4096),
        ..ModelConfig::decoder(Family::NemotronH, count, hidden, f.size("vocab_size")?)
    })
}

/// Kinds of Nemotron-H's layers, from a list of names or from a text with one letter per layer.
fn nemotron_layers(f: &Fields<'_>) -> Result<Vec<LayerKind>, SpecError> {
    let pattern = f.maybe_text("hybrid_override_pattern")?;
    let named = f.texts("layers_block_type")?;
    let count = f.maybe("num_hidden_layers")?;
    let (field, kinds): (_, Option<Vec<LayerKind>>) = match (named, pattern) {
        (Some(named), _) => {
            let kind = |name: &&str| match *name {
                "mamba" | "linear_attention" => Some(LayerKind::Recurrence),
                "attention" | "full_attention" => Some(LayerKind::Attention),
                "mlp" => Some(LayerKind::FeedForward),
                "moe" => Some(LayerKind::Experts),
                _ => None,
            };
            ("layers_block_type", named.iter().map(kind).collect())
        }
        (None, Some(pattern)) => {
            let kind = |letter: char| match letter {
                'M' => Some(LayerKind::Recurrence),
                '*' => Some(LayerKind::Attention),
                '-' => Some(LayerKind::FeedForward),
                'E' => Some(LayerKind::Experts),
                _ => None,
            };
            (
                "hybrid_override_pattern",
                pattern.chars().map(kind).collect(),
            )
        }
        (None, None) => {
            let message = "missing; expected a text of M, *, - and E, one letter for each layer";
            return Err(f.wrong("hybrid_override_pattern", message));
        }
    };
    let Some(kinds) = kinds else {
        let message = "expected Mamba-2 layers (M), attention (*), feed-forward blocks (-) and experts (E) only";
        return Err(f.wrong(field, message));
    };
    if count.is_some_and(|count| count != kinds.len() as u64) {
        let message = format!(
            "{} layers, but num_hidden_layers is a different number",
            kinds.len()
        );
        return Err(f.wrong(field, message));
    }
    Ok(kinds)
}

fn nemotron_attention(f: &Fields<'_>) -> Result<Attention, SpecError> {
    let heads = f.size("num_attention_heads")?;
    let bias = f.flag("attention_bias", false)?;
    let older = f.maybe("attention_head_dim")?;
    Ok(Attention {
        heads,
        kind: AttentionKind::Grouped {
            kv_heads: f.usual("num_key_value_heads")?.unwrap_or(heads),
            head_dim: f.maybe("head_dim")?.or(older).unwrap_or(128),
            qk_norm: QkNorm::Absent,
            projections: Projections::Separate,
        },
        qkv_bias: bias,
        out_bias: bias,
        window: WindowPattern::Full,
        rotated: Rotated::All,
        sinks: false,
    })
}

fn nemotron_experts(f: &Fields<'_>, used: bool) -> Result<Option<Moe>, SpecError> {
    let experts = f.maybe("n_routed_experts")?;
    let top_k = f.maybe("num_experts_per_tok")?;
    let expert_ffn = f.maybe("moe_intermediate_size")?;
    let shared = f.maybe("moe_shared_expert_intermediate_size")?;
    f.maybe("n_shared_experts")?;
    if !used {
        return Ok(None);
    }
    let needed = |field: &str, size: Option<u64>| {
        size.ok_or_else(|| f.wrong(field, "missing; expected a whole number"))
    };
    Ok(Some(Moe {
        // One shared block of this width, however many shared experts the file counts.
        shared_ffn: needed("moe_shared_expert_intermediate_size", shared)?,
        router_correction_bias: true,
        ..Moe::routed(
            needed("n_routed_experts", experts)?,
            needed("num_experts_per_tok", top_k)?,
            needed("moe_intermediate_size", expert_ffn)?,
        )
    }))
}

fn state_space(f: &Fields<'_>) -> Result<StateSpace, SpecError> {
    if let Some(other) = f.maybe_text("mamba_hidden_act")?.filter(|&a| a != "silu") {
        let message = format!("{other} is not modelled; expected silu");
        return Err(f.wrong("mamba_hidden_act", message));
    }
    Ok(StateSpace {
        heads: f.size("mamba_num_heads")?,
        head_dim: f.size("mamba_head_dim")?,
        state: f.size("ssm_state_size")?,
        groups: f.size("n_groups")?,
        kernel: f.maybe("conv_kernel")?.unwrap_or(4),
        kernel_bias: f.flag("use_conv_bias", true)?,
        chunk: f.maybe("chunk_size")?.unwrap_or(128),
    })
}

/// Refuses features that a file of this family may switch on but that are not modelled.
fn refused(f: &Fields<'_>) -> Result<(), SpecError> {
    for switch in ["use_bias", "mamba_proj_bias", "residual_in_fp32"] {
        f.only(switch, false)?;
    }
    for (field, what) in [
        (
            "num_nextn_predict_layers",
            "prediction modules of hybrid models",
        ),
        ("moe_latent_size", "experts behind a latent projection"),
        ("sliding_window", "sliding windows in hybrid models"),
    ] {
        if f.maybe(field)?.is_some_and(|size| size > 0) {
            return Err(f.wrong(field, format!("{what} are not modelled")));
        }
    }
    Ok(())
}

/// Decodes `qwen3_next`: Qwen3's mixture of experts, with gated delta nets for most attention.
pub(super) fn qwen3_next(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
    let model = llama::model(f, "qwen3_next")?;
    let every = f.maybe("full_attention_interval")?.unwrap_or(4);
    let layers = match f.texts("layer_types")? {
        Some(named) => {
            let kind = |name: &&str| match *name {
                "linear_attention" => Some(LayerKind::RecurrenceThenFeedForward),
                "full_attention" => Some(LayerKind::AttentionThenFeedForward),
                _ => None,
            };
            let kinds: Option<Vec<LayerKind>> = named.iter().map(kind).collect();
            let message = "layers other than linear_attention and full_attention are not modelled";
            kinds.ok_or_else(|| f.wrong("layer_types", message))?
        }
        None if every == 0 => return Err(f.wrong("full_attention_interval", "expected 1 or more")),
        None => (1..=model.layers)
            .map(|layer| match layer.is_multiple_of(every) {
                true => LayerKind::AttentionThenFeedForward,
                false => LayerKind::RecurrenceThenFeedForward,
            })
            .collect(),
    };
    let size = |field: &str, usual: u64| Ok::<_, SpecError>(f.maybe(field)?.unwrap_or(usual));
    let recurrence = Recurrence::GatedDelta(GatedDelta {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
    });
    Ok(ModelConfig {
        hybrid: Some(Hybrid {
            layers,
            recurrence,
            gated_attention: true,
        }),
        ..model
    })
}
