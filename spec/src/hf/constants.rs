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
    let gelu = f
        .maybe_text("activation_function")?
        .or(f.maybe_text("hidden_act")?);
    // Newer files hold everything about rotary positions in one object.
    let rope = f.nested("rope_parameters");
    let theta = match &rope {
        Some(rope) => rope.real("rope_theta")?,
        None => f.real("rope_theta")?,
    };
    Ok(ModelConstants {
        norm_epsilon,
        rope_theta: theta.unwrap_or(if kind == "mixtral" {
            1e6
        } else {
            usual.rope_theta
        }),
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
