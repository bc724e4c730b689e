//! Families with GPT's parts: LayerNorm, biases, an MLP without gates.

use super::fields::Fields;
use super::parts::{LAYER_NORM, head_dim, rotated};
use super::{llama, unread};
use crate::error::SpecError;
use crate::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, Position, Projections, QkNorm,
    Residual, Rotated, WindowPattern,
};

/// A model with GPT's parts: LayerNorm, biases, GELU, an MLP without gates. Callers change the
/// parts in which their family differs.
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
        tied_embeddings: true,
        norm: LAYER_NORM,
        attention: Attention {
            heads,
            kind: AttentionKind::Grouped {
                kv_heads: heads,
                head_dim,
                qk_norm: QkNorm::Absent,
                projections: Projections::Stacked,
            },
            qkv_bias: true,
            out_bias: true,
            window: WindowPattern::Full,
            rotated: Rotated::All,
            sinks: false,
        },
        mlp: Mlp {
            ffn,
            activation: Activation::Gelu,
            gated: false,
            bias: true,
            fused_gate_up: false,
        },
        max_position: 2048,
        ..ModelConfig::decoder(family, layers, hidden, vocab)
    })
}

fn set_projections(model: &mut ModelConfig, how: Projections) {
    if let AttentionKind::Grouped { projections, .. } = &mut model.attention.kind {
        *projections = how;
    }
}

pub(super) fn gpt2(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
        hidden_dropout: f.same_fraction(&["resid_pdrop", "embd_pdrop"])?,
        attention_dropout: f.fraction("attn_pdrop")?,
        max_position: positions,
        ..base
    })
}

pub(super) fn opt(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
    base.tied_embeddings = f.flag("tie_word_embeddings", true)?;
    // The table has two more rows than there are positions.
    base.position = Position::Learned {
        rows: positions + 2,
    };
    base.max_position = positions;
    base.hidden_dropout = f.maybe_fraction("dropout")?.unwrap_or(0.1);
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

pub(super) fn bloom(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
        tied_embeddings: f.flag("tie_word_embeddings", true)?,
        embedding_norm: true,
        position: Position::Alibi,
        hidden_dropout: f.fraction("hidden_dropout")?,
        attention_dropout: f.fraction("attention_dropout")?,
        ..base
    })
}

pub(super) fn gpt_neox(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
    let position = rotated(f, "gpt_neox", &base.attention)?;
    f.only("attention_bias", true)?;
    let parallel = f.flag("use_parallel_residual", true)?;
    Ok(ModelConfig {
        tied_embeddings: f.flag("tie_word_embeddings", false)?,
        position,
        hidden_dropout: f.fraction("hidden_dropout")?,
        attention_dropout: f.fraction("attention_dropout")?,
        residual: if parallel {
            Residual::Parallel { shared_norm: false }
        } else {
            Residual::Sequential
        },
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(2048),
        ..base
    })
}

pub(super) fn falcon(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
        qk_norm: QkNorm::Absent,
        projections: Projections::Grouped,
    };
    base.attention.qkv_bias = bias;
    base.attention.out_bias = bias;
    base.mlp.bias = bias;
    base.position = Position::Rope { dims: head_dim };
    let norms = f.maybe("num_ln_in_parallel_attn")?.unwrap_or(2);
    base.residual = Residual::Parallel {
        shared_norm: !new || norms == 1,
    };
    base.hidden_dropout = f.fraction("hidden_dropout")?;
    base.attention_dropout = f.fraction("attention_dropout")?;
    base.max_position = f.maybe("max_position_embeddings")?.unwrap_or(2048);
    base.tied_embeddings = f.flag("tie_word_embeddings", true)?;
    Ok(base)
}

pub(super) fn mpt(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
    if f.maybe_text("norm_type")?
        .is_some_and(|norm| !norm.contains("layernorm"))
    {
        return Err(f.wrong(
            "norm_type",
            "is not modelled; expected low_precision_layernorm",
        ));
    }
    let attention = f.nested("attn_config")?;
    if let Some(attention) = &attention {
        attention.only("qk_ln", false)?;
        base.attention_dropout = attention.fraction("attn_pdrop")?;
    }
    let alibi = match &attention {
        Some(attention) => attention.flag("alibi", true)?,
        None => true,
    };
    if let Some(attention) = attention {
        unread::check(&attention, "mpt")?;
    }
    base.hidden_dropout = f.same_fraction(&["resid_pdrop", "emb_pdrop"])?;
    base.tied_embeddings = f.flag("tie_word_embeddings", true)?;
    base.norm.bias = bias;
    base.attention.qkv_bias = bias;
    base.attention.out_bias = bias;
    base.mlp.bias = bias;
    base.max_position = f.maybe("max_seq_len")?.unwrap_or(2048);
    base.position = if alibi {
        Position::Alibi
    } else {
        Position::Learned {
            rows: base.max_position,
        }
    };
    Ok(base)
}

/// StarCoder2: Llama's layout with GPT's parts: LayerNorm, biases, an MLP without gates.
pub(super) fn starcoder2(f: &Fields<'_>) -> Result<ModelConfig, SpecError> {
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
    let attention = llama::attention(f, "starcoder2", heads, hidden)?;
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
        hidden_dropout: f.same_fraction(&["residual_dropout", "embedding_dropout"])?,
        attention_dropout: f.fraction("attention_dropout")?,
        max_position: f.maybe("max_position_embeddings")?.unwrap_or(4096),
        ..base
    })
}
