//! Finds out which model a configuration is for: reads it from the file, looks it up in the library, and compares it with
//! a given one.

use catalog::model::ModelConfig;
use catalog::{Model, SpecError, load};

use super::document::Document;
use super::error::ImportError;
use super::settled::settled;
use super::{megatron_config, megatron_model, nanotron, titan_model, trainer};
use crate::export::{Dialect, flag};

/// The model that a configuration file is for.
#[derive(Clone, Debug, PartialEq)]
pub struct OfFile {
    /// Its sizes and parts.
    pub model: Model,
    /// Its name in the library; for a model that is not there, the name of the file or the path of the model's folder.
    pub name: String,
    /// Whether it is in the library.
    pub known: bool,
    /// How it differs from the nearest model of the library, where that is known.
    pub differs: Option<String>,
}

impl OfFile {
    fn new(model: Model, name: String, known: bool) -> Self {
        Self {
            model,
            name,
            known,
            differs: None,
        }
    }
}

/// The model that a file describes in full; `None` for systems whose files do not.
fn described(doc: &Document) -> Result<Option<Model>, ImportError> {
    if doc.dialect != Dialect::Nanotron {
        return Ok(None);
    }
    Ok(Some(decoded(doc, &nanotron::model(doc)?)?))
}

/// The key that names the model, and its value: a name on the hub or a folder.
fn named(doc: &Document) -> Result<Option<(&'static str, &str)>, ImportError> {
    match doc.dialect {
        Dialect::Axolotl
        | Dialect::Transformers
        | Dialect::TransformersDeepSpeed
        | Dialect::LlamaFactory => trainer::named(doc),
        Dialect::MegatronBridge => Ok(doc.python.hub_model.as_deref().map(|id| ("model", id))),
        _ => Ok(None),
    }
}

/// Fails if the file is for another model than `model`; returns a sentence for each difference that is only in
/// constants.
pub(super) fn same(doc: &Document, model: &ModelConfig) -> Result<Vec<String>, ImportError> {
    let other = |key: &str, message: &str| {
        doc.unsupported(key, &format!("{message}; give the right --model"))
    };
    let against = |key: &str, theirs: &ModelConfig| match titan_model::difference(theirs, model) {
        Some(message) => Err(other(key, &message)),
        None if theirs.constants != model.constants => Ok(vec![format!(
            "{}: {key}: a constant of the model (epsilon, rotation, router) differs from that of {}",
            doc.place(key),
            model.name
        )]),
        None => Ok(Vec::new()),
    };
    if let Some(theirs) = described(doc)? {
        return against(nanotron::MODEL, &theirs);
    }
    if let Some((key, name)) = named(doc)? {
        let Some(preset) = load::preset_of_hub_name(name) else {
            return Ok(Vec::new());
        };
        let theirs = load::model(preset)?;
        return against(key, &theirs);
    }
    match doc.dialect {
        Dialect::MegatronLm => {
            let compared = megatron_model::compare(doc, model)?;
            if let Some((key, message)) = compared.another.first() {
                return Err(other(key, message));
            }
            let note =
                |(key, message): &(&str, String)| format!("{}: {key}: {message}", doc.place(key));
            Ok(compared.nearly.iter().map(note).collect())
        }
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            let Some((key, known)) = titan_model::named(doc)? else {
                return Ok(Vec::new());
            };
            let differences: Option<Vec<String>> = known
                .iter()
                .map(|theirs| titan_model::difference(theirs, model))
                .collect();
            match differences.as_deref() {
                Some([message, ..]) => Err(other(key, message)),
                _ => Ok(Vec::new()),
            }
        }
        _ => Ok(Vec::new()),
    }
}

/// The model that the file is for.
///
/// # Errors
/// When the file does not say its model, or names one that is not in the library or a folder.
pub fn of_file(doc: &Document) -> Result<OfFile, ImportError> {
    settled(doc, of_reading)
}

/// The model that one way through a script is for.
fn of_reading(doc: &Document) -> Result<OfFile, ImportError> {
    if let Some(model) = described(doc)? {
        return Ok(equal_of_library(model));
    }
    let name = match named(doc)? {
        Some((key, id)) => match load::preset_of_hub_name(id) {
            Some(preset) => preset.to_owned(),
            None => return of_folder(doc, key, id),
        },
        None => match of_library(doc) {
            Ok(preset) => preset,
            Err(error) => {
                let mut found = of_script(doc)?.ok_or(error.clone())?;
                found.differs = match error {
                    ImportError::Value { key, message, .. } => {
                        let difference = message.split(';').next().unwrap_or_default();
                        Some(format!("{key}: {difference}"))
                    }
                    _ => None,
                };
                return Ok(found);
            }
        },
    };
    Ok(OfFile::new(load::model(&name)?, name, true))
}

/// The model built from a Megatron-LM script's options; fails if it then differs from the script in any option.
fn of_script(doc: &Document) -> Result<Option<OfFile>, ImportError> {
    if doc.dialect != Dialect::MegatronLm || !megatron_model::describes(doc) {
        return Ok(None);
    }
    megatron_model::decodes(doc)?;
    let model = decoded(doc, &megatron_config::config(doc)?).map_err(|error| {
        let SpecError::Field { field, message, .. } = &error else {
            return error.into();
        };
        match field.contains(['/', ' ']) {
            true => error.into(),
            false => doc.unsupported(&flag::option(field), message),
        }
    })?;
    let compared = megatron_model::compare(doc, &model)?;
    if let Some((key, message)) = compared.another.iter().chain(&compared.nearly).next() {
        let hint = format!("{message}, as it is read; give --model with its config.json");
        return Err(doc.unsupported(key, &hint));
    }
    let name = model.name.clone();
    Ok(Some(OfFile::new(model, name, false)))
}

/// A model from the fields of a `config.json`, named as the file is.
fn decoded(doc: &Document, config: &serde_json::Value) -> Result<Model, SpecError> {
    catalog::hf::decode(&config.to_string(), &doc.path, &name_of(doc))
}

fn name_of(doc: &Document) -> String {
    let name = std::path::Path::new(&doc.path).file_stem();
    name.map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

/// The library's model that equals this one in all but its name, or this one if there is none.
fn equal_of_library(model: Model) -> OfFile {
    let equal = |theirs: &Model| {
        let named = ModelConfig {
            name: theirs.name.clone(),
            ..ModelConfig::clone(&model)
        };
        named == **theirs
    };
    let presets = load::model_names().into_iter();
    let mut presets = presets.filter_map(|preset| load::model(&preset.name).ok());
    let preset = presets.find(equal);
    let known = preset.is_some();
    let model = preset.unwrap_or(model);
    let name = model.name.clone();
    OfFile::new(model, name, known)
}

/// A model that the file names by a folder with its `config.json`.
fn of_folder(doc: &Document, key: &str, folder: &str) -> Result<OfFile, ImportError> {
    let beside = std::path::Path::new(&doc.path).with_file_name(folder);
    let found = [beside.display().to_string(), folder.to_owned()];
    let found = found
        .into_iter()
        .find(|folder| std::path::Path::new(folder).join("config.json").exists());
    let Some(folder) = found else {
        let hint = "is not a model preset; give --model with its config.json";
        return Err(doc.unsupported(key, &format!("`{folder}` {hint}")));
    };
    Ok(OfFile::new(load::model(&folder)?, folder, false))
}

/// The name of the library's model that a Megatron-LM script or a torchtitan configuration is for.
fn of_library(doc: &Document) -> Result<String, ImportError> {
    let missing = || doc.missing("the model", "give --model");
    let known = match doc.dialect {
        Dialect::MegatronLm if megatron_model::describes(doc) => Vec::new(),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            titan_model::named(doc)?.ok_or_else(missing)?.1
        }
        _ => return Err(missing()),
    };
    let mut nearest: Option<(usize, bool, usize, String)> = None;
    for preset in load::model_names() {
        let Ok(model) = load::model(&preset.name) else {
            continue;
        };
        let (another, vocabulary, nearly) = if doc.dialect == Dialect::MegatronLm {
            let compared = megatron_model::compare(doc, &model)?;
            let [vocabulary, positions] = megatron_model::unlike(doc, &model)?;
            let nearly = compared.nearly.len() + usize::from(positions);
            (compared.another.len(), vocabulary, nearly)
        } else {
            let equal = |theirs: &ModelConfig| titan_model::difference(theirs, &model).is_none();
            (usize::from(!known.iter().any(equal)), false, 0)
        };
        let candidate = (another, vocabulary, nearly, preset.name);
        if nearest.as_ref().is_none_or(|best| candidate < *best) {
            nearest = Some(candidate);
        }
    }
    match nearest {
        Some((0, _, _, name)) => Ok(name),
        Some((.., name)) if doc.dialect == Dialect::MegatronLm => {
            let model = load::model(&name)?;
            let compared = megatron_model::compare(doc, &model)?;
            let differing = compared.another.first();
            let (key, message) = differing.map_or(("--num-layers", ""), |(k, m)| (*k, m.as_str()));
            let hint =
                format!("{message}, the nearest of the library; give --model with its config.json");
            Err(doc.unsupported(key, &hint))
        }
        _ => Err(missing()),
    }
}
