//! Constants of a model's arithmetic: epsilons, rotary frequencies, standard deviations of initial weights.

use super::fields::Fields;
use super::parts::one_of;
use crate::elementary;
use crate::error::SpecError;
use crate::model::{Activation, ModelConstants, Router, Temperature};
use crate::rope::RopeScaling;

/// Reads a model's numerical constants from its `config.json`: the epsilon of its norms, the base of its rotary positions and
/// others. A constant that the file does not give has the default of Transformers' code for the model's family.
pub(super) fn decode(
    f: &Fields<'_>,
    kind: &str,
    activation: Activation,
) -> Result<ModelConstants, SpecError> {
    let gemma3 = kind.starts_with("gemma3");
    let gemma = gemma3 || kind == "gemma2";
    let norm_epsilon = norm_epsilon(f, kind)?;
    let gelu_tanh = gelu_tanh(f, kind, activation)?;
    let rotary = Rotary::of(f)?;
    let rope_theta = rotary.theta.unwrap_or(usual_theta(kind));
    let rope_scaling = match &rotary.rope {
        Some(rope) => rope_scaling(rope, f)?,
        None => RopeScaling::None,
    };
    let cap = |field: &str, usual: f64| match kind {
        "gemma2" => f.real_or(field, usual),
        "gemma3" | "gemma3_text" => f.real(field),
        _ => Ok(None),
    };
    Ok(ModelConstants {
        norm_epsilon,
        rope_theta,
        local_rope_theta: match kind {
            _ if gemma3 => Some(rotary.local_theta.unwrap_or(10_000.0)),
            "olmo3" => rotary.local(rope_theta, rope_scaling),
            _ => None,
        },
        norm_from_one: gemma || matches!(kind, "nemotron" | "qwen3_next"),
        embedding_scale: if gemma {
            (f.size("hidden_size")? as f64).sqrt()
        } else {
            1.0
        },
        attention_scale: attention_scale(f, kind, rotary.rope.as_ref())?,
        temperature: match kind {
            "llama4" | "llama4_text" => temperature(f)?,
            _ => None,
        },
        attention_cap: cap("attn_logit_softcapping", 50.0)?,
        logit_cap: cap("final_logit_softcapping", 30.0)?,
        rope_scaling,
        gelu_tanh,
        rope_neighbours: match kind {
            "deepseek_v2" => true,
            "deepseek_v3" => f.flag("rope_interleave", true)?,
            "llama4" | "llama4_text" | "ernie4_5_moe" => true,
            _ => false,
        },
        router: router(f, kind)?,
        bounded_glu: match kind {
            "gpt_oss" => f.real_or("swiglu_limit", 7.0)?,
            _ => None,
        },
        initializer_range: deviation(f, kind)?,
    })
}

/// The epsilon of norms, which files call by several names; the last one present wins.
fn norm_epsilon(f: &Fields<'_>, kind: &str) -> Result<f64, SpecError> {
    let mut found = None;
    for name in [
        "rms_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_eps",
        "norm_epsilon",
    ] {
        found = f.real(name)?.or(found);
    }
    let small = ["qwen", "gemma", "deepseek", "minimax"]
        .iter()
        .any(|family| kind.starts_with(family));
    let usual = match kind {
        "llama" | "mistral" => 1e-6,
        _ if small => 1e-6,
        _ => ModelConstants::default().norm_epsilon,
    };
    Ok(found.unwrap_or(usual))
}

/// Standard deviation of the initial weights; the family's own if the file gives none.
fn deviation(f: &Fields<'_>, kind: &str) -> Result<f64, SpecError> {
    let said = match kind {
        "opt" => f.real("init_std")?,
        _ => f.real("initializer_range")?,
    };
    Ok(said.unwrap_or(match kind {
        "nemotron" => 0.0134,
        "starcoder2" => 0.018_042,
        _ => ModelConstants::default().initializer_range,
    }))
}

/// Whether GELU is computed by its tanh approximation. Fails if the file names another activation than the family's.
fn gelu_tanh(f: &Fields<'_>, kind: &str, activation: Activation) -> Result<bool, SpecError> {
    let exact = matches!(
        kind,
        "falcon" | "RefinedWeb" | "RefinedWebModel" | "mpt" | "gpt_neox"
    );
    let keys: &[&str] = match kind {
        // These families ignore `hidden_act`.
        "gemma2" | "gemma3" | "gemma3_text" => &["hidden_activation"],
        "gpt2" | "opt" => &["activation_function"],
        "falcon" | "RefinedWeb" | "RefinedWebModel" => &["activation"],
        "nemotron_h" => &["mlp_hidden_act"],
        _ => &["hidden_act"],
    };
    for key in keys {
        let Some(name) = f.maybe_text(key)? else {
            continue;
        };
        let (named, tanh) = match name {
            "gelu" | "gelu_python" => (Activation::Gelu, false),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => (Activation::Gelu, true),
            "silu" | "swish" => (Activation::Silu, true),
            "relu" => (Activation::Relu, true),
            "relu2" => (Activation::Relu2, true),
            _ => return Err(f.wrong(key, format!("{name} is not modelled"))),
        };
        if named != activation {
            let message = format!("{name} is not modelled for {kind}, which has {activation:?}");
            return Err(f.wrong(key, message));
        }
        return Ok(tanh);
    }
    Ok(!exact)
}

/// Base of the rotary frequencies where the file gives none.
fn usual_theta(kind: &str) -> f64 {
    match kind {
        "mixtral" | "gemma3" | "gemma3_text" => 1e6,
        "gpt_oss" => 150_000.0,
        "minimax_m2" => 5e6,
        "olmo3" | "llama4" | "llama4_text" | "ernie4_5_moe" => 500_000.0,
        _ => ModelConstants::default().rope_theta,
    }
}

/// The rotary-position fields of a file.
struct Rotary<'a> {
    /// The object that describes frequency scaling for longer contexts.
    rope: Option<Fields<'a>>,
    theta: Option<f64>,
    /// Base of the frequencies in layers with local attention.
    local_theta: Option<f64>,
}

impl<'a> Rotary<'a> {
    /// OLMo 3's base in layers with a window, not rescaled; `None` if equal to the other layers.
    fn local(&self, theta: f64, scaling: RopeScaling) -> Option<f64> {
        let local = self.local_theta.unwrap_or(theta);
        (scaling != RopeScaling::None || local != theta).then_some(local)
    }

    fn of(f: &Fields<'a>) -> Result<Self, SpecError> {
        // Newer files hold everything about rotary positions in one object.
        let rope = f.nested("rope_parameters")?;
        // Gemma 3 has one such object for each kind of layer.
        let by_kind = |kind: &str| match &rope {
            Some(rope) => rope.nested(kind),
            None => Ok(None),
        };
        let local = by_kind("sliding_attention")?;
        let rope = by_kind("full_attention")?
            .or(rope)
            .or(f.nested("rope_scaling")?);
        let own_theta = match &rope {
            Some(rope) => rope.real("rope_theta")?,
            None => None,
        };
        let theta = own_theta
            .or(f.real("rope_theta")?)
            .or(f.real("rotary_emb_base")?);
        let local_theta = match &local {
            Some(local) => local.real("rope_theta")?,
            None => f.real("rope_local_base_freq")?,
        };
        Ok(Self {
            rope,
            theta,
            local_theta,
        })
    }
}

/// Factor on attention scores; `None` for one over the square root of the head dimension.
fn attention_scale(
    f: &Fields<'_>,
    kind: &str,
    rope: Option<&Fields<'_>>,
) -> Result<Option<f64>, SpecError> {
    if kind.starts_with("deepseek") {
        let width = (f.size("qk_nope_head_dim")? + f.size("qk_rope_head_dim")?) as f64;
        return Ok(Some(sharpened(rope, f)?.powi(2) / width.sqrt()));
    }
    if !kind.starts_with("gemma") {
        return Ok(None);
    }
    let scalar = f.real_or("query_pre_attn_scalar", 256.0)?;
    Ok(scalar.map(|s| 1.0 / s.sqrt()))
}

/// YaRN's temperature if `mscale_all_dim` asks for it, otherwise 1. Attention scores are multiplied
/// by its square.
fn sharpened(rope: Option<&Fields<'_>>, f: &Fields<'_>) -> Result<f64, SpecError> {
    let Some(rope) = rope else { return Ok(1.0) };
    match (rope_scaling(rope, f)?, rope.real("mscale_all_dim")?) {
        (RopeScaling::Yarn { factor, .. }, Some(all)) => Ok(grown(factor, all)),
        _ => Ok(1.0),
    }
}

/// YaRN's temperature for a context extended by a factor (Peng et al. 2023, §3.4).
pub(super) fn grown(factor: f64, scale: f64) -> f64 {
    if factor > 1.0 {
        0.1 * scale * elementary::ln(factor) + 1.0
    } else {
        1.0
    }
}

/// How Llama 4 scales queries by position in layers without rotary positions; `None` if it is off.
fn temperature(f: &Fields<'_>) -> Result<Option<Temperature>, SpecError> {
    let tuned = f.truth("attn_temperature_tuning", true)?;
    let floor = f.maybe("floor_scale")?.unwrap_or(8192);
    let scale = f.real_or("attn_scale", 0.1)?.unwrap_or(0.0);
    Ok(tuned.then_some(Temperature { floor, scale }))
}

fn router(f: &Fields<'_>, kind: &str) -> Result<Router, SpecError> {
    let usual = Router {
        normalise: f.flag(
            "norm_topk_prob",
            matches!(
                kind,
                "mixtral"
                    | "deepseek_v3"
                    | "glm4_moe"
                    | "minimax_m2"
                    | "ernie4_5_moe"
                    | "gpt_oss"
                    | "nemotron_h"
                    | "qwen3_next"
            ),
        )?,
        ..Router::default()
    };
    let grouped = |usual: Router, groups: Option<u64>, best: Option<u64>| Router {
        groups: groups.unwrap_or(usual.groups),
        best_groups: best.unwrap_or(usual.best_groups),
        ..usual
    };
    let scale = |usual: f64| f.real_or("routed_scaling_factor", usual);
    Ok(match kind {
        "deepseek_v2" => {
            let router = Router {
                // The family's code does not normalise.
                normalise: false,
                scale: scale(1.0)?.unwrap_or(1.0),
                ..usual
            };
            f.only("norm_topk_prob", false)?;
            one_of(f, "scoring_func", &["softmax"])?;
            let (groups, best) = (f.maybe("n_group")?, f.maybe("topk_group")?);
            match one_of(f, "topk_method", &["greedy", "group_limited_greedy"])? {
                Some("group_limited_greedy") => grouped(router, groups, best),
                _ => router,
            }
        }
        "deepseek_v3" | "glm4_moe" => {
            one_of(f, "scoring_func", &["sigmoid"])?;
            one_of(f, "topk_method", &["noaux_tc"])?;
            let usual = Router {
                sigmoid: true,
                scale: scale(if kind == "deepseek_v3" { 2.5 } else { 1.0 })?.unwrap_or(1.0),
                ..usual
            };
            let router = match kind {
                "deepseek_v3" => grouped(usual, Some(8), Some(4)),
                _ => usual,
            };
            grouped(router, f.maybe("n_group")?, f.maybe("topk_group")?)
        }
        "nemotron_h" => {
            let router = Router {
                sigmoid: true,
                scale: scale(1.0)?.unwrap_or(1.0),
                ..usual
            };
            grouped(router, f.maybe("n_group")?, f.maybe("topk_group")?)
        }
        "llama4" | "llama4_text" => Router {
            sigmoid: true,
            weighs_inputs: true,
            ..usual
        },
        "minimax_m2" => minimax(f, usual)?,
        _ => usual,
    })
}

fn minimax(f: &Fields<'_>, usual: Router) -> Result<Router, SpecError> {
    one_of(f, "scoring_func", &["sigmoid"])?;
    f.only("use_routing_bias", true)?;
    let sigmoid = true;
    Ok(Router { sigmoid, ..usual })
}

/// Kinds of frequency scaling in Transformers (`modeling_rope_utils.py`), with older names of `longrope`. Frequencies of the last four
/// are not computed here: they change no prediction.
const ROPE_TYPES: [&str; 8] = [
    "default", "linear", "llama3", "yarn", "dynamic", "longrope", "su", "mrope",
];

/// The kind of frequency scaling that a field names; fails if Transformers has none of that name.
fn rope_type<'a>(rope: &Fields<'a>, field: &str) -> Result<Option<&'a str>, SpecError> {
    let named = rope.maybe_text(field)?;
    match named.filter(|kind| !ROPE_TYPES.contains(kind)) {
        Some(kind) => {
            let kind: String = kind.chars().take(40).collect();
            let known = ROPE_TYPES.join(", ");
            let message = format!("unknown kind `{kind}`; expected one of {known}");
            Err(rope.wrong(field, message))
        }
        None => Ok(named),
    }
}

fn rope_scaling(rope: &Fields<'_>, model: &Fields<'_>) -> Result<RopeScaling, SpecError> {
    let kind = match rope_type(rope, "rope_type")? {
        Some(kind) => Some(kind),
        None => rope_type(rope, "type")?,
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
            let attention = match (
                rope.real("attention_factor")?,
                rope.real("mscale")?,
                rope.real("mscale_all_dim")?,
            ) {
                (Some(given), _, _) => given,
                (None, Some(rotated), Some(all)) => grown(factor, rotated) / grown(factor, all),
                _ => grown(factor, 1.0),
            };
            RopeScaling::Yarn {
                factor,
                original: original()?,
                beta_fast: rope.real("beta_fast")?.unwrap_or(32.0),
                beta_slow: rope.real("beta_slow")?.unwrap_or(1.0),
                attention,
                whole_pairs: rope.flag("truncate", true)?,
            }
        }
        Some(_) => {
            rope.real("factor")?;
            RopeScaling::Other
        }
    })
}
