//! Numbers of a model's arithmetic: epsilons, rotary frequencies, spreads of initial weights.

use super::fields::Fields;
use crate::error::SpecError;
use crate::model::ModelConstants;
use crate::rope::RopeScaling;

/// The arithmetic's constants, where the file leaves them out as the family's code has them.
pub(super) fn decode(f: &Fields<'_>, kind: &str) -> Result<ModelConstants, SpecError> {
    let usual = ModelConstants::default();
    let epsilon = [
        "rms_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_eps",
    ];
    let mut norm_epsilon = usual.norm_epsilon;
    for name in epsilon {
        norm_epsilon = f.real(name)?.unwrap_or(norm_epsilon);
    }
    let exact = matches!(
        kind,
        "falcon" | "RefinedWeb" | "RefinedWebModel" | "mpt" | "gpt_neox"
    );
    let gelu = f
        .maybe_text("activation_function")?
        .or(f.maybe_text("hidden_act")?)
        .or(f.maybe_text("hidden_activation")?)
        .or(f.maybe_text("activation")?)
        .or(exact.then_some("gelu"));
    // Newer files hold everything about rotary positions in one object.
    let rope = f.nested("rope_parameters");
    let gemma3 = kind.starts_with("gemma3");
    let gemma = gemma3 || kind == "gemma2";
    // Gemma 3 has one such object for each kind of layer.
    let by_kind = |kind: &str| rope.as_ref().and_then(|r| r.nested(kind));
    let local_rope = by_kind("sliding_attention");
    let rope = by_kind("full_attention").or(rope);
    let theta = match &rope {
        Some(rope) => rope.real("rope_theta")?,
        None => f.real("rope_theta")?.or(f.real("rotary_emb_base")?),
    };
    let local_rope_theta = match &local_rope {
        Some(local) => local.real("rope_theta")?,
        None => f.real("rope_local_base_freq")?,
    };
    let scalar = match gemma {
        true => f.real_or("query_pre_attn_scalar", 256.0)?,
        false => None,
    };
    let cap = |field: &str, usual: f64| match kind {
        "gemma2" => f.real_or(field, usual),
        "gemma3" | "gemma3_text" => f.real(field),
        _ => Ok(None),
    };
    Ok(ModelConstants {
        norm_epsilon,
        rope_theta: theta.unwrap_or(if kind == "mixtral" || gemma3 {
            1e6
        } else {
            usual.rope_theta
        }),
        local_rope_theta: gemma3.then(|| local_rope_theta.unwrap_or(10_000.0)),
        norm_from_one: gemma,
        embedding_scale: if gemma {
            (f.size("hidden_size")? as f64).sqrt()
        } else {
            1.0
        },
        attention_scale: scalar.map(|s| 1.0 / s.sqrt()),
        attention_cap: cap("attn_logit_softcapping", 50.0)?,
        logit_cap: cap("final_logit_softcapping", 30.0)?,
        rope_scaling: match rope.or(f.nested("rope_scaling")) {
            Some(rope) => rope_scaling(&rope, f)?,
            None => RopeScaling::None,
        },
        gelu_tanh: gelu != Some("gelu"),
        normalise_top_k: f.flag("norm_topk_prob", kind == "mixtral")?,
        initializer_range: f
            .real("initializer_range")?
            .unwrap_or(usual.initializer_range),
    })
}

fn rope_scaling(rope: &Fields<'_>, model: &Fields<'_>) -> Result<RopeScaling, SpecError> {
    let kind = match rope.maybe_text("rope_type")? {
        Some(kind) => Some(kind),
        None => rope.maybe_text("type")?,
    };
    let original = || -> Result<f64, SpecError> {
        let own = rope.real("original_max_position_embeddings")?;
        match own.or(model.real("original_max_position_embeddings")?) {
            Some(length) => Ok(length),
            None => model.needed("max_position_embeddings"),
        }
    };
    Ok(match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: rope.needed("factor")?,
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: rope.needed("factor")?,
            low_freq_factor: rope.needed("low_freq_factor")?,
            high_freq_factor: rope.needed("high_freq_factor")?,
            original: original()?,
        },
        Some("yarn") => {
            let factor = rope.needed("factor")?;
            let grown = |scale: f64| {
                if factor > 1.0 {
                    0.1 * scale * factor.ln() + 1.0
                } else {
                    1.0
                }
            };
            let attention = match (
                rope.real("attention_factor")?,
                rope.real("mscale")?,
                rope.real("mscale_all_dim")?,
            ) {
                (Some(given), _, _) => given,
                (None, Some(rotated), Some(all)) => grown(rotated) / grown(all),
                _ => grown(1.0),
            };
            RopeScaling::Yarn {
                factor,
                original: original()?,
                beta_fast: rope.real("beta_fast")?.unwrap_or(32.0),
                beta_slow: rope.real("beta_slow")?.unwrap_or(1.0),
                attention,
            }
        }
        Some(_) => RopeScaling::Other,
    })
}
