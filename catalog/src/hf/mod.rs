//! Reads models from Hugging Face `config.json` files.

mod constants;
mod fields;
mod gpt;
mod llama;
#[cfg(test)]
mod tests;
mod unread;

use serde_json::Value;

use crate::checked::Model;
use crate::error::SpecError;
use crate::model::{Attention, AttentionKind, ModelConfig, Norm, NormKind, Position};
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

/// Decodes a `config.json`; `path` is for error messages, `name` for reports. The model carries the fields that define
/// it.
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
    let model = model(&fields, kind)?;
    unread::check(&fields, kind)?;
    let definition = fields.definition(kind);
    let model = Model::new(
        ModelConfig {
            name: name.to_owned(),
            ..model
        },
        path,
    )?;
    Ok(model.defined_by(definition))
}

fn model(fields: &Fields<'_>, kind: &str) -> Result<ModelConfig, SpecError> {
    let model = match kind {
        "gpt2" => gpt::gpt2(fields)?,
        "opt" => gpt::opt(fields)?,
        "bloom" => gpt::bloom(fields)?,
        "gpt_neox" => gpt::gpt_neox(fields)?,
        "falcon" | "RefinedWeb" | "RefinedWebModel" => gpt::falcon(fields)?,
        "mpt" => gpt::mpt(fields)?,
        "starcoder2" => gpt::starcoder2(fields)?,
        "llama" | "mistral" | "qwen2" | "qwen3" | "gemma2" | "gemma3" | "gemma3_text" | "phi3"
        | "mixtral" | "qwen2_moe" | "qwen3_moe" | "deepseek_v2" | "deepseek_v3" | "gpt_oss"
        | "nemotron" => llama::model(fields, kind)?,
        _ => {
            return Err(SpecError::Unknown {
                kind: "model_type",
                name: kind.to_owned(),
                nearest: nearest_above(kind, TYPES, ALIKE),
            });
        }
    };
    let constants = constants::decode(fields, kind, model.mlp.activation)?;
    Ok(ModelConfig {
        stored_as: stored_as(fields)?,
        constants,
        ..model
    })
}

/// How positions are rotated: how many of a head's dimensions, where the family's code rotates a share of them.
fn rotated(f: &Fields<'_>, kind: &str, attention: &Attention) -> Result<Position, SpecError> {
    let head = match attention.kind {
        AttentionKind::Latent { qk_rope_dim, .. } => qk_rope_dim,
        AttentionKind::Grouped { head_dim, .. } => head_dim,
    };
    let (names, usual): (&[&str], f64) = match kind {
        "gpt_neox" => (&["rotary_pct"], 0.25),
        "nemotron" => (&["rope_percent", "rope_percentage"], 0.5),
        "phi3" => (&[], 1.0),
        _ => {
            if let Some(rope) = f.nested("rope_parameters") {
                unread::check(&rope, kind)?;
            }
            return Ok(Position::Rope { dims: head });
        }
    };
    let mut share = match f.nested("rope_parameters") {
        Some(rope) => rope.real("partial_rotary_factor")?,
        None => None,
    };
    for name in ["partial_rotary_factor"].iter().chain(names) {
        let said = f.real(name)?;
        share = share.or(said);
    }
    // The product is rounded down, as the families' code does.
    let dims = (head as f64 * share.unwrap_or(usual)) as u64;
    Ok(Position::Rope { dims })
}

const RMS_NORM: Norm = Norm {
    kind: NormKind::RmsNorm,
    bias: false,
};

const LAYER_NORM: Norm = Norm {
    kind: NormKind::LayerNorm,
    bias: true,
};

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
