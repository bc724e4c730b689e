//! Reads models from Hugging Face `config.json` files, and from files of that form with Megatron-LM's options.

mod constants;
mod fields;
mod gpt;
mod hybrid;
mod llama;
mod megatron_lm;
mod parts;
#[cfg(test)]
mod tests;
mod unread;
mod windows;

use serde_json::Value;

use crate::checked::Model;
use crate::error::SpecError;
use crate::model::ModelConfig;
use crate::suggest::nearest_above;
use fields::Fields;

/// Similarity from which an unknown model type counts as misspelt; less similar names are other families.
const ALIKE: f64 = 0.88;

/// Model types whose code is another type's, and that type.
const SAME: &[(&str, &str)] = &[("kimi_k2", "deepseek_v3")];

/// Model types that are known and not modelled, and why.
const NOT_MODELLED: &[(&str, &str)] = &[
    ("deepseek_v32", SPARSE),
    ("deepseek_v4", SPARSE),
    ("glm_moe_dsa", SPARSE),
];

const SPARSE: &str = "attention to the tokens that an indexer selects is not modelled";

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
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "llama4",
    "llama4_text",
    "gpt_oss",
    "nemotron",
    "nemotron_h",
    "qwen3_next",
    "starcoder2",
    "megatron_lm",
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
    let same = SAME.iter().find(|(named, _)| *named == kind);
    let kind = same.map_or(kind, |(_, same)| same);
    if let Some((_, why)) = NOT_MODELLED.iter().find(|(named, _)| *named == kind) {
        return Err(fields.wrong("model_type", format!("{kind}: {why}")));
    }
    let multimodal = matches!(kind, "gemma3" | "llama4");
    let nested = multimodal.then(|| fields.nested("text_config")).flatten();
    let fields = nested.unwrap_or(fields);
    let model = model(&fields, kind)?;
    unread::check(&fields, kind)?;
    let definition = fields.definition(kind);
    let model = Model::new(
        ModelConfig {
            name: name.to_owned(),
            text_of: multimodal.then(|| kind.to_owned()),
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
        "nemotron_h" => hybrid::nemotron_h(fields)?,
        "qwen3_next" => hybrid::qwen3_next(fields)?,
        "llama" | "mistral" | "qwen2" | "qwen3" | "olmo2" | "olmo3" | "gemma2" | "gemma3"
        | "gemma3_text" | "phi3" | "mixtral" | "qwen2_moe" | "qwen3_moe" | "deepseek_v2"
        | "deepseek_v3" | "glm4_moe" | "minimax_m2" | "ernie4_5_moe" | "llama4" | "llama4_text"
        | "gpt_oss" | "nemotron" => llama::model(fields, kind)?,
        // Its constants are options too.
        "megatron_lm" => return megatron_lm::model(fields),
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
