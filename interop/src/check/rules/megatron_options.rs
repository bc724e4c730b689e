//! Rules of Megatron-LM between options, read from a table (`megatron_options.txt`).

use super::collector::Rules;
use crate::check::finding::Severity;
use crate::config::Value;

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

/// Reports the rules of the table that the file's options break.
pub(super) fn options(r: &mut Rules<'_>) {
    for row in TABLE.lines().filter(|row| row.starts_with('-')) {
        let Some((when, what, others, source)) = parts(row) else {
            continue;
        };
        let conditions: Vec<&str> = when.split(" & ").collect();
        let all = conditions.iter().copied().chain(others.split(" | "));
        // The value of an environment variable is unknown here.
        if all
            .flat_map(|of| words(r, name(of)))
            .any(|word| word.starts_with('$'))
        {
            continue;
        }
        if !conditions.iter().all(|condition| holds(r, condition)) {
            continue;
        }
        let others = others.split(" | ");
        let standing = others.clone().find(|other| holds(r, other));
        let message = match (what, standing) {
            (EXCLUDES, Some(other)) => format!("cannot be combined with {}", shown(other)),
            (EXCLUDES, None) | (_, Some(_)) => continue,
            (NEEDS, None) => format!("needs {}", any(others)),
            (_, None) => format!("has no effect without {}", any(others)),
        };
        let severity = match what {
            IDLE => Severity::Warning,
            _ => Severity::Error,
        };
        let key = name(conditions[0]);
        let mut given = String::new();
        if conditions[0].contains('=') {
            given = format!("{} ", words(r, key).join(" "));
        }
        let also: Vec<String> = (conditions[1..].iter())
            .filter(|also| !also.starts_with('!'))
            .map(|also| shown(also))
            .collect();
        if !also.is_empty() {
            given.push_str(&format!("with {} ", also.join(" and ")));
        }
        r.find(severity, key, format!("{given}{message} ({source})"));
    }
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

fn any<'a>(conditions: impl Iterator<Item = &'a str>) -> String {
    conditions.map(shown).collect::<Vec<_>>().join(" or ")
}

fn name(condition: &str) -> &str {
    let condition = condition.trim_start_matches('!');
    condition.split(['=', '>']).next().unwrap_or(condition)
}

/// A condition in words.
fn shown(condition: &str) -> String {
    condition
        .replace('=', " ")
        .replace('/', " or ")
        .replace(">0", "")
        .replace('>', " above ")
}

fn holds(r: &Rules<'_>, condition: &str) -> bool {
    let key = name(condition);
    if let Some(turned) = condition.strip_prefix('!') {
        return !holds(r, turned);
    }
    if let Some((_, values)) = condition.split_once('=') {
        let said = words(r, key);
        return values
            .split('/')
            .any(|value| said.iter().any(|word| word == value));
    }
    match condition.split_once('>') {
        Some((_, least)) => r.size(key) > least.parse().ok(),
        None => r.has(key),
    }
}

/// The words of an option's value, or of its default.
fn words(r: &Rules<'_>, key: &str) -> Vec<String> {
    match r.doc.find(key).map(|node| &node.value) {
        Some(Value::List(items)) => items.iter().map(|item| item.value.plain()).collect(),
        Some(value) => vec![value.plain()],
        None => {
            let usual = DEFAULTS.iter().filter(|(name, _)| *name == key);
            usual.map(|(_, value)| (*value).to_owned()).collect()
        }
    }
}
