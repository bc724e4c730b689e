//! Writes trees as JSON, YAML, TOML or Python.

use super::escape::quoted;
use super::node::{Node, Value, below};

/// The tree as a JSON document.
#[must_use]
pub fn json(root: &Node) -> String {
    let mut text = String::new();
    json_into(&root.value, 0, &mut text);
    text.push('\n');
    text
}

fn json_into(value: &Value, depth: usize, out: &mut String) {
    let pad = |n: usize| "  ".repeat(n);
    match value {
        Value::Table(entries) | Value::Call(_, entries) if !entries.is_empty() => {
            out.push_str("{\n");
            for (i, (key, node)) in entries.iter().enumerate() {
                out.push_str(&format!("{}{}: ", pad(depth + 1), quoted(key)));
                json_into(&node.value, depth + 1, out);
                out.push_str(if i + 1 < entries.len() { ",\n" } else { "\n" });
            }
            out.push_str(&format!("{}}}", pad(depth)));
        }
        Value::Table(_) | Value::Call(..) => out.push_str("{}"),
        Value::List(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                json_into(&item.value, depth, out);
            }
            out.push(']');
        }
        _ => out.push_str(&scalar(value, JSON)),
    }
}

/// The tree as a YAML document: block mappings, flow lists.
#[must_use]
pub fn yaml(root: &Node) -> String {
    let mut text = String::new();
    yaml_into(root.entries(), 0, &mut text);
    text
}

fn yaml_into(entries: &[(String, Node)], depth: usize, out: &mut String) {
    for (key, node) in entries {
        let pad = "  ".repeat(depth);
        match &node.value {
            Value::Table(inner) if !inner.is_empty() => {
                out.push_str(&format!("{pad}{key}:\n"));
                yaml_into(inner, depth + 1, out);
            }
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(|i| yaml_scalar(&i.value)).collect();
                out.push_str(&format!("{pad}{key}: [{}]\n", items.join(", ")));
            }
            Value::Table(_) => out.push_str(&format!("{pad}{key}: {{}}\n")),
            value => out.push_str(&format!("{pad}{key}: {}\n", yaml_scalar(value))),
        }
    }
}

fn yaml_scalar(value: &Value) -> String {
    match value {
        // Words that every YAML reader takes for strings need no quotes.
        Value::Str(s) if is_plain(s) => s.clone(),
        Value::Table(entries) => {
            let pair =
                |(key, node): &(String, Node)| format!("{key}: {}", yaml_scalar(&node.value));
            let pairs: Vec<String> = entries.iter().map(pair).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => scalar(value, JSON),
    }
}

fn is_plain(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let reserved = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(word)
        && !reserved.contains(&text.to_lowercase().as_str())
}

/// The tree as a TOML document: the scalars and lists of each section, then the sections below it.
#[must_use]
pub fn toml(root: &Node) -> String {
    let mut text = String::new();
    toml_into(root.entries(), "", &mut text);
    text
}

fn toml_into(entries: &[(String, Node)], section: &str, out: &mut String) {
    let (tables, values): (Vec<_>, Vec<_>) = entries
        .iter()
        .partition(|(_, node)| matches!(node.value, Value::Table(_)));
    if !values.is_empty() && !section.is_empty() {
        if !out.is_empty() {
            out.push('\n');
        }
        out.push_str(&format!("[{section}]\n"));
    }
    for (key, node) in values {
        out.push_str(&format!("{key} = {}\n", inline(node, JSON)));
    }
    for (key, node) in tables {
        toml_into(node.entries(), &below(section, key), out);
    }
}

/// The tree as a Python expression.
#[must_use]
pub fn python(node: &Node) -> String {
    inline(node, PYTHON)
}

fn inline(node: &Node, words: Words) -> String {
    match &node.value {
        Value::List(items) => {
            let nested = items.iter().any(|i| matches!(i.value, Value::List(_)));
            let items: Vec<String> = items.iter().map(|i| inline(i, words)).collect();
            if nested {
                format!("[\n    {},\n]", items.join(",\n    "))
            } else {
                format!("[{}]", items.join(", "))
            }
        }
        Value::Call(name, arguments) => {
            let arguments: Vec<String> = arguments
                .iter()
                .map(|(key, node)| format!("{key}={}", inline(node, words)))
                .collect();
            format!("{name}({})", arguments.join(", "))
        }
        Value::Table(entries) => {
            let entries: Vec<String> = entries
                .iter()
                .map(|(key, node)| format!("{}: {}", quoted(key), inline(node, words)))
                .collect();
            format!("{{{}}}", entries.join(", "))
        }
        value => scalar(value, words),
    }
}

/// How a syntax spells null, true and false.
type Words = [&'static str; 3];

const JSON: Words = ["null", "true", "false"];
const PYTHON: Words = ["None", "True", "False"];

fn scalar(value: &Value, words: Words) -> String {
    let [null, yes, no] = words;
    match value {
        Value::Null => null.to_owned(),
        Value::Bool(true) => yes.to_owned(),
        Value::Bool(false) => no.to_owned(),
        Value::Int(i) => i.to_string(),
        Value::Float(f) => number(*f),
        Value::Str(s) => quoted(s),
        Value::Expression(text) => text.clone(),
        Value::List(_) | Value::Table(_) | Value::Call(..) => String::new(),
    }
}

/// A float such as `1.0e-5`, not `1e-5`, which PyYAML reads as a string.
fn number(f: f64) -> String {
    let text = format!("{f:?}");
    match text.split_once('e') {
        Some((digits, power)) if !digits.contains('.') => format!("{digits}.0e{power}"),
        _ => text,
    }
}
