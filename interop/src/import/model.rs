//! Finds out which model a configuration is for: checks it against the given one, or looks it up in the library.

use catalog::model::ModelConfig;

use super::document::Document;
use super::error::ImportError;
use super::{megatron_model, titan_model};
use crate::export::Dialect;

/// Fails if the file is for another model than `model`; returns a sentence for each difference that is only in
/// constants.
pub(super) fn same(doc: &Document, model: &ModelConfig) -> Result<Vec<String>, ImportError> {
    let other = |key: &str, message: &str| {
        doc.unsupported(key, &format!("{message}; give the right --model"))
    };
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

/// The name of the library's model that the file is for.
///
/// # Errors
/// When the file does not describe its model, or the library has no equal one.
pub fn of_library(doc: &Document) -> Result<String, ImportError> {
    let missing = || doc.missing("the model", "give --model");
    let known = match doc.dialect {
        Dialect::MegatronLm if megatron_model::describes(doc) => Vec::new(),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            titan_model::named(doc)?.ok_or_else(missing)?.1
        }
        _ => return Err(missing()),
    };
    let mut nearest: Option<(usize, usize, String)> = None;
    for preset in catalog::load::model_names() {
        let Ok(model) = catalog::load::model(&preset.name) else {
            continue;
        };
        let (another, nearly) = if doc.dialect == Dialect::MegatronLm {
            let compared = megatron_model::compare(doc, &model)?;
            (compared.another.len(), compared.nearly.len())
        } else {
            let equal = |theirs: &ModelConfig| titan_model::difference(theirs, &model).is_none();
            (usize::from(!known.iter().any(equal)), 0)
        };
        let candidate = (another, nearly, preset.name);
        if nearest.as_ref().is_none_or(|best| candidate < *best) {
            nearest = Some(candidate);
        }
    }
    match nearest {
        Some((0, _, name)) => Ok(name),
        Some((_, _, name)) if doc.dialect == Dialect::MegatronLm => {
            let model = catalog::load::model(&name)?;
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
