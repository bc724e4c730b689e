//! Compares the model that a torchtitan configuration names with a known one.

use catalog::model::{AttentionKind, ModelConfig, Projections};

use super::document::Document;
use super::error::ImportError;
use crate::config::{Node, Value};
use crate::export::Dialect;
use crate::export::torchtitan::{DECODERS, Edition, flavors};

/// The models that the file's flavor may stand for, with the key that names it; `None` if the file names none, or one
/// that is not in torchtitan's registries.
///
/// # Errors
/// When the file is for a model that is not a text decoder.
pub(super) fn named(
    doc: &Document,
) -> Result<Option<(&'static str, Vec<ModelConfig>)>, ImportError> {
    if doc.dialect != Dialect::Torchtitan02 {
        let edition = match doc.dialect {
            Dialect::TorchtitanMain => Edition::PythonMain,
            _ => Edition::Python03,
        };
        let name = doc.find("model_spec").and_then(registered);
        let known = name.map(|name| flavors(edition, module(doc), &name));
        return Ok(known.filter(|k| !k.is_empty()).map(|k| ("model_spec", k)));
    }
    let module = doc.text("model.name")?;
    if let Some(module) = module
        && !DECODERS.contains(&module)
    {
        let message = format!(
            "{module} is no model that this program knows; it knows {}",
            DECODERS.join(", ")
        );
        return Err(doc.unsupported("model.name", &message));
    }
    let Some(name) = doc.text("model.flavor")? else {
        return Ok(None);
    };
    let known = flavors(Edition::Toml02, module, name);
    Ok((!known.is_empty()).then_some(("model.flavor", known)))
}

/// The module whose registry a Python file uses: the one that it imports, or for torchtitan's own files the folder.
fn module(doc: &Document) -> Option<&str> {
    let folder = || {
        let folder = std::path::Path::new(&doc.path).parent()?;
        let name = folder.file_name()?.to_str()?;
        DECODERS.contains(&name).then_some(name)
    };
    doc.python.registry.as_deref().or_else(folder)
}

/// The flavor name in `model_registry("8B", …)`.
fn registered(node: &Node) -> Option<String> {
    let text = match &node.value {
        Value::Expression(text) | Value::Str(text) => text.as_str(),
        Value::Call(name, arguments) if name == "model_registry" => {
            return arguments.first()?.1.text().map(str::to_owned);
        }
        _ => return None,
    };
    let arguments = text.trim().strip_prefix("model_registry(")?;
    let quoted = arguments.trim_start().strip_prefix(['"', '\''])?;
    quoted.split(['"', '\'']).next().map(str::to_owned)
}

/// How a part of a model is shown.
type Shown = fn(&ModelConfig) -> String;

/// The first size or part in which a model differs from torchtitan's. Numerical constants are not compared, nor whether
/// projections are fused into one weight.
pub(super) fn difference(theirs: &ModelConfig, model: &ModelConfig) -> Option<String> {
    let attention = |model: &ModelConfig| {
        let mut attention = model.attention.clone();
        if let AttentionKind::Grouped { projections, .. } = &mut attention.kind {
            *projections = Projections::Separate;
        }
        format!("{attention:?}")
    };
    let parts: [(&str, Shown); 6] = [
        ("layers", |of| of.layers.to_string()),
        ("hidden", |of| of.hidden.to_string()),
        ("vocab", |of| of.vocab.to_string()),
        ("attention", attention),
        ("moe", |of| format!("{:?}", of.moe)),
        ("ffn", |of| of.mlp.ffn.to_string()),
    ];
    let routed = theirs.moe.is_some();
    let differs = parts
        .map(|(part, shown)| (part, shown(theirs), shown(model)))
        .into_iter()
        .find(|(part, a, b)| a != b && !(routed && *part == "ffn"));
    differs.map(|(part, a, b)| format!("{part} {a}, but model {} has {b}", model.name))
}
