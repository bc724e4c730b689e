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
mod usual;
mod windows;

use serde_json::Value;

use crate::checked::Model;
use crate::error::SpecError;
use crate::model::ModelConfig;
use crate::suggest::nearest_above;
use fields::Fields;

/// Similarity from which an unknown model type counts as misspelt; less similar names are other families.
const ALIKE: f64 = 0.88;

/// Model types with the code of another type, and that type.
const SAME: &[(&str, &str)] = &[("kimi_k2", "deepseek_v3")];

/// Model types that are known and not modelled, and why.
const NOT_MODELLED: &[(&str, &str)] = &[
    ("deepseek_v32", SPARSE),
    ("deepseek_v4", SPARSE),
    ("glm_moe_dsa", SPARSE),
];

/// Model types of Transformers 5 that are no misspellings of those modelled, however similar their names are.
const OTHERS: &[&str] = &[
    "ernie4_5",
    "gemma",
    "gemma3n_text",
    "glm4",
    "glm4_moe_lite",
    "gptj",
    "minimax_m1",
    "ministral",
    "ministral3",
    "mistral3",
    "mistral4",
    "olmo",
    "olmo_hybrid",
    "olmoe",
    "phi",
    "qwen",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
];

const SPARSE: &str = "attention to the tokens that an indexer selects is not modelled";

/// Reads the fields of a model of a type.
type Reader = fn(&Fields<'_>, &str) -> Result<ModelConfig, SpecError>;

/// Model types, each with its reader.
const TYPES: &[(&str, Reader)] = &[
    ("gpt2", |f, _| gpt::gpt2(f)),
    ("opt", |f, _| gpt::opt(f)),
    ("bloom", |f, _| gpt::bloom(f)),
    ("gpt_neox", |f, _| gpt::gpt_neox(f)),
    ("falcon", |f, _| gpt::falcon(f)),
    ("RefinedWeb", |f, _| gpt::falcon(f)),
    ("RefinedWebModel", |f, _| gpt::falcon(f)),
    ("mpt", |f, _| gpt::mpt(f)),
    ("llama", llama::model),
    ("mistral", llama::model),
    ("qwen2", llama::model),
    ("qwen3", llama::model),
    ("olmo2", llama::model),
    ("olmo3", llama::model),
    ("gemma2", llama::model),
    ("gemma3", llama::model),
    ("gemma3_text", llama::model),
    ("phi3", llama::model),
    ("mixtral", llama::model),
    ("qwen2_moe", llama::model),
    ("qwen3_moe", llama::model),
    ("deepseek_v2", llama::model),
    ("deepseek_v3", llama::model),
    ("glm4_moe", llama::model),
    ("minimax_m2", llama::model),
    ("ernie4_5_moe", llama::model),
    ("llama4", llama::model),
    ("llama4_text", llama::model),
    ("gpt_oss", llama::model),
    ("nemotron", llama::model),
    ("nemotron_h", |f, _| hybrid::nemotron_h(f)),
    ("qwen3_next", |f, _| hybrid::qwen3_next(f)),
    ("starcoder2", |f, _| gpt::starcoder2(f)),
    ("megatron_lm", |f, _| megatron_lm::model(f)),
];

/// Decodes a `config.json`; `path` is for error messages, `name` for reports. The model carries the fields that define
/// it.
///
/// # Errors
/// When the model type is unknown, a needed field is missing, or sizes contradict each other.
pub fn decode(text: &str, path: &str, name: &str) -> Result<Model, SpecError> {
    let value: Value = crate::text::json_value(&crate::text::finite(text), path)?;
    let fields = Fields::new(&value, path)?;
    let kind = fields.text("model_type")?;
    let same = SAME.iter().find(|(named, _)| *named == kind);
    let kind = same.map_or(kind, |(_, same)| same);
    if let Some((_, why)) = NOT_MODELLED.iter().find(|(named, _)| *named == kind) {
        return Err(fields.wrong("model_type", format!("{kind}: {why}")));
    }
    let multimodal = matches!(kind, "gemma3" | "llama4");
    let nested = match multimodal {
        true => fields.nested("text_config")?,
        false => None,
    };
    // Files of multi-modal models say how weights are stored beside the text model.
    let around = nested.is_some().then_some(&fields);
    let around_stored = around.map(stored_as).transpose()?.flatten();
    let quantization = around_stored
        .is_some()
        .then(|| value["quantization_config"].clone());
    let fields = nested.unwrap_or(fields);
    let fields = fields.of_kind(kind);
    let model = model(&fields, kind).map_err(|error| fields.in_file(error))?;
    unread::check(&fields, kind)?;
    let mut definition = fields.definition(kind);
    if let Some(quantization) = quantization {
        definition["quantization_config"] = quantization;
    }
    let model = Model::new(
        ModelConfig {
            name: name.to_owned(),
            stored_as: around_stored.or(model.stored_as),
            text_of: multimodal.then(|| kind.to_owned()),
            ..model
        },
        path,
    );
    let model = model.map_err(|error| fields.in_file(error))?;
    Ok(model.defined_by(definition))
}

fn model(fields: &Fields<'_>, kind: &str) -> Result<ModelConfig, SpecError> {
    let Some((_, read)) = TYPES.iter().find(|(named, _)| *named == kind) else {
        let types = TYPES.iter().map(|(named, _)| named);
        let misspelt = !OTHERS.contains(&kind);
        let nearest = misspelt
            .then(|| nearest_above(kind, types, ALIKE))
            .flatten();
        return Err(fields.unknown("model_type", kind, nearest));
    };
    let model = read(fields, kind)?;
    if kind == "megatron_lm" {
        // Its reader also sets the constants, from Megatron-LM's options.
        return Ok(model);
    }
    let constants = constants::decode(fields, kind, model.mlp.activation)?;
    Ok(ModelConfig {
        stored_as: stored_as(fields)?,
        constants,
        ..model
    })
}

/// Storage format of the published weights if nothing trains in it (`fp8`, `mxfp4`), else `None`.
/// Training is planned in `--precision`. Weights in formats for inference are refused.
fn stored_as(f: &Fields<'_>) -> Result<Option<String>, SpecError> {
    let Some(quantization) = f.nested("quantization_config")? else {
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
