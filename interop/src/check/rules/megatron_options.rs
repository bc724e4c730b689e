//! Rules of Megatron-LM between options, read from a table (`megatron_options.txt`). Those of Megatron-Core are also Bridge's.

use super::collector::Rules;
use crate::check::finding::Severity;
use crate::config::{Node, Value};
use crate::export::Dialect;
use crate::import::bridge_field;

const TABLE: &str = include_str!("megatron_options.txt");

/// Megatron-LM's values of absent options.
const DEFAULTS: [(&str, &str); 8] = [
    ("--ckpt-format", "torch_dist"),
    ("--cp-comm-type", "p2p"),
    ("--fp8-recipe", "delayed"),
    ("--moe-router-score-function", "softmax"),
    ("--moe-token-dispatcher-type", "allgather"),
    ("--optimizer", "adam"),
    ("--position-embedding-type", "learned_absolute"),
    ("--transformer-impl", "transformer_engine"),
];

/// Files of Megatron-LM whose rules hold for its command line alone. Those of Megatron-Core and Transformer Engine hold for Megatron
/// Bridge too.
const OF_COMMAND_LINE: [&str; 2] = ["arguments.py", "argument_utils.py"];
/// Options of the command line that stand for no field of Megatron-Core's configuration.
const SHORTHANDS: [&str; 1] = ["--recompute-activations"];

/// Reports the rules of the table that the file breaks: by options of Megatron-LM, or by Bridge's fields of the same meaning.
pub(super) fn options(r: &mut Rules<'_>) {
    for row in TABLE.lines().filter(|row| row.starts_with('-')) {
        let Some((when, what, others, source)) = parts(row) else {
            continue;
        };
        let foreign = OF_COMMAND_LINE.iter().any(|file| source.starts_with(file));
        if is_bridge(r) && foreign {
            continue;
        }
        let conditions: Vec<&str> = when.split(" & ").collect();
        if !conditions.iter().all(|of| holds(r, of) == Some(true)) {
            continue;
        }
        let others: Vec<&str> = others.split(" | ").collect();
        let standing = others.iter().find(|of| holds(r, of) == Some(true));
        let message = match (what, standing) {
            (EXCLUDES, Some(other)) => format!("cannot be combined with {}", shown(r, other)),
            (EXCLUDES, None) | (_, Some(_)) => continue,
            // One that the file leaves open may hold.
            _ if others.iter().any(|of| holds(r, of).is_none()) => continue,
            (NEEDS, None) => format!("needs {}", any(r, &others)),
            (_, None) => format!("has no effect without {}", any(r, &others)),
        };
        let severity = match what {
            IDLE => Severity::Warning,
            _ => Severity::Error,
        };
        let Some((key, given)) = subject(r, &conditions) else {
            continue;
        };
        r.find(severity, &key, format!("{given}{message} ({source})"));
    }
}

/// The key that a finding is about, and what the file says of it and of the other conditions.
fn subject(r: &Rules<'_>, conditions: &[&str]) -> Option<(String, String)> {
    let (first, rest) = conditions.split_first()?;
    let option = name(first);
    let (key, mut given) = (key(r, option), String::new());
    if first.contains('=') {
        given = format!("{} ", words(r, option).join(" "));
    }
    let also: Vec<String> = (rest.iter())
        .filter(|also| !also.starts_with('!'))
        .map(|also| shown(r, also))
        .collect();
    if !also.is_empty() {
        given.push_str(&format!("with {} ", also.join(" and ")));
    }
    Some((key, given))
}

const NEEDS: &str = " needs ";
const EXCLUDES: &str = " excludes ";
const IDLE: &str = " is idle without ";

/// Splits a row into its condition, the kind of rule, the other options, and the line of code.
fn parts(row: &str) -> Option<(&str, &str, &str, &str)> {
    let (rule, source) = row.split_once("; ")?;
    [NEEDS, EXCLUDES, IDLE].into_iter().find_map(|what| {
        let (when, others) = rule.split_once(what)?;
        Some((when, what, others, source))
    })
}

fn any(r: &Rules<'_>, conditions: &[&str]) -> String {
    let fields = |condition: &&&str| !(is_bridge(r) && SHORTHANDS.contains(&name(condition)));
    let shown = (conditions.iter().filter(fields)).map(|condition| shown(r, condition));
    shown.collect::<Vec<_>>().join(" or ")
}

fn is_bridge(r: &Rules<'_>) -> bool {
    r.doc.dialect == Dialect::MegatronBridge
}

/// Where the file sets an option of Megatron-LM: the key and its value; `None` if it does not.
fn said<'a>(r: &Rules<'a>, option: &str) -> Option<(String, &'a Node)> {
    match is_bridge(r) {
        true => bridge_field(r.doc, option),
        false => r.doc.find(option).map(|node| (option.to_owned(), node)),
    }
}

/// The name that an option has in the file.
fn key(r: &Rules<'_>, option: &str) -> String {
    said(r, option).map_or_else(|| option.to_owned(), |(key, _)| key)
}

fn name(condition: &str) -> &str {
    let condition = condition.trim_start_matches('!');
    condition.split(['=', '>']).next().unwrap_or(condition)
}

/// A condition in words.
fn shown(r: &Rules<'_>, condition: &str) -> String {
    let option = name(condition);
    let rest = condition.strip_prefix(option).unwrap_or_default();
    let rest = rest
        .replace('=', " ")
        .replace('/', " or ")
        .replace(">0", "")
        .replace('>', " above ");
    key(r, option) + &rest
}

/// Whether a condition holds; `None` if the file leaves it open.
fn holds(r: &Rules<'_>, condition: &str) -> Option<bool> {
    if let Some(turned) = condition.strip_prefix('!') {
        return holds(r, turned).map(|holds| !holds);
    }
    let option = name(condition);
    let found = said(r, option);
    // What a recipe does not set, the recipe that it starts from may.
    if found.is_none() && is_bridge(r) && !SHORTHANDS.contains(&option) {
        return None;
    }
    let words = words(r, option);
    let node = found.map(|(_, node)| node);
    if words.iter().any(|word| word.starts_with('$')) || node.is_some_and(is_open) {
        return None;
    }
    if let Some((_, values)) = condition.split_once('=') {
        let named = |value: &str| words.iter().any(|word| word == value);
        return Some(values.split('/').any(named));
    }
    Some(match condition.split_once('>') {
        Some((_, least)) => node.and_then(Node::int) > least.parse().ok(),
        None => node.is_some_and(|node| !matches!(node.value, Value::Null | Value::Bool(false))),
    })
}

/// Whether a value is an expression other than a tuple, such as a variable of the recipe.
fn is_open(node: &Node) -> bool {
    matches!(&node.value, Value::Expression(text) if !text.starts_with('('))
}

/// The words of an option's value, or of its default.
fn words(r: &Rules<'_>, option: &str) -> Vec<String> {
    match said(r, option).map(|(_, node)| &node.value) {
        Some(Value::List(items)) => items.iter().map(|item| item.value.plain()).collect(),
        Some(value) => vec![value.plain()],
        None => {
            let usual = DEFAULTS.iter().filter(|(name, _)| *name == option);
            usual.map(|(_, value)| (*value).to_owned()).collect()
        }
    }
}
