//! A call by which recipes of Megatron Bridge choose what carries tokens to their experts.

use crate::config::{Node, Value};

/// The function that switches the flexible dispatcher on (Megatron-Bridge@067f987, training/flex_dispatcher_backend.py).
const FUNCTION: &str = "apply_flex_dispatcher_backend";
/// The field, and argument, that names the library behind that dispatcher.
const BACKEND: &str = "moe_flex_dispatcher_backend";
/// The library in models of Bridge whose recipe names none (Megatron-LM, transformer_config.py).
const USUAL: &str = "deepep";

/// The fields that a call of that function sets in the configuration read so far, with their paths; none for other calls, and
/// for libraries that it does not know, with which it leaves the configuration as it is.
pub(super) fn settings(root: &Node, call: &Node) -> Vec<(String, Node)> {
    let Some((model, backend)) = chosen(root, call) else {
        return Vec::new();
    };
    let fields: [(&str, Value); 3] = [
        ("moe_token_dispatcher_type", "flex".into()),
        (BACKEND, backend.into()),
        ("moe_shared_expert_overlap", false.into()),
    ];
    let line = call.line;
    let at = |(field, value)| (format!("{model}.{field}"), Node { line, value });
    fields.map(at).into()
}

/// The section that such a call changes, and the library that it names.
fn chosen<'a>(root: &Node, call: &'a Node) -> Option<(&'a str, String)> {
    let Value::Call(function, arguments) = &call.value else {
        return None;
    };
    if function.rsplit('.').next() != Some(FUNCTION) {
        return None;
    }
    let argument = |names: [&str; 2]| {
        let mut all = arguments.iter();
        let found = all.find(|(name, _)| names.contains(&name.as_str()));
        found.map(|(_, node)| &node.value)
    };
    let Value::Expression(model) = argument(["#0", "model_config"])? else {
        return None;
    };
    let backend = match argument(["#1", BACKEND])? {
        Value::Str(name) => name.clone(),
        Value::Expression(path) => match root.at(below(path)) {
            Some(node) => node.text()?.to_owned(),
            None if path.ends_with(BACKEND) => USUAL.to_owned(),
            None => return None,
        },
        _ => return None,
    };
    let known = ["deepep", "hybridep"].contains(&backend.as_str());
    known.then(|| (below(model), backend))
}

/// A path without the variable that holds the configuration: `model` of `cfg.model`.
fn below(path: &str) -> &str {
    path.trim()
        .split_once('.')
        .map_or(path.trim(), |(_, below)| below)
}
