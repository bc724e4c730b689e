//! Strict checks of a configuration: unknown keys with the nearest known one, values of the wrong type, and keys that
//! contradict each other. The systems themselves silently ignore many of these.

mod finding;
mod rules;

pub use self::finding::{Finding, Severity};

use catalog::model::ModelConfig;

use crate::config::{Node, Value, below};
use crate::export::schema::{Kind, Schema};
use crate::export::{Dialect, PLACEHOLDER};
use crate::import::Document;

/// All problems of a configuration, in the order of the file.
///
/// # Errors
/// Never for the embedded schemas; a test reads them all.
pub fn check(
    document: &Document,
    model: Option<&ModelConfig>,
) -> Result<Vec<Finding>, catalog::SpecError> {
    let schema = Schema::of(document.dialect)?;
    let mut findings = Vec::new();
    let root = &document.root;
    let nothing = |what: &str| Finding {
        severity: Severity::Error,
        path: document.path.clone(),
        line: 0,
        key: document.dialect.name(),
        message: format!("{what}; a configuration is expected"),
    };
    let states_nothing = document.states_nothing()?;
    if root.entries().is_empty() {
        findings.extend(states_nothing.map(nothing));
        return Ok(findings);
    }
    visit(document, schema, &mut |key, node| {
        value(document, schema, key, node, &mut findings);
    });
    let wrong = findings.iter().any(|f| f.severity == Severity::Error);
    findings.extend(states_nothing.filter(|_| !wrong).map(nothing));
    left_open(document, "", root, &mut findings);
    rules::contradictions(document, model, &mut findings);
    let undecided = document.others.iter().map(|(way, _)| Finding {
        severity: Severity::Warning,
        path: way.condition.condition.0.clone(),
        line: way.condition.line,
        key: way.options.join(", "),
        message: way.assumption(),
    });
    findings.extend(undecided);
    findings.sort_by_key(|f| f.line);
    Ok(findings)
}

/// Keys of a configuration that contradict each other or the model, by its system's rules.
#[must_use]
pub fn contradictions(document: &Document, model: &ModelConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    rules::contradictions(document, Some(model), &mut findings);
    findings
}

/// Notes on the keys of a file that look like misspelt keys of its system, one sentence each. Their
/// values are ignored.
///
/// # Errors
/// Never for the embedded schemas; a test reads them all.
pub fn misspelt(document: &Document) -> Result<Vec<String>, catalog::SpecError> {
    let schema = Schema::of(document.dialect)?;
    let mut notes = Vec::new();
    let mut judge = |key: &str, node: &Node| {
        let unknown = schema.kind(key).is_none() && !schema.is_section(key);
        if unknown && notes.len() < MOST_HINTS && schema.misspells(key) {
            let place = crate::config::place(&document.path, node.line);
            let near = schema.nearest(key);
            let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
            notes.push(format!("{place}: `{key}` is unknown and not read{near}"));
        }
    };
    visit(document, schema, &mut judge);
    Ok(notes)
}

/// Visits every key of a document except sections. Names of Megatron-LM's options may hold dots.
fn visit(doc: &Document, schema: &Schema, each: &mut dyn FnMut(&str, &Node)) {
    if doc.dialect == Dialect::MegatronLm {
        let entries = doc.root.entries().iter();
        entries.for_each(|(key, node)| each(key, node));
    } else {
        section(doc, schema, "", &doc.root, each);
    }
}

/// Visits every key below a section except sections and, in Python files, local variables.
fn section(
    doc: &Document,
    schema: &Schema,
    prefix: &str,
    node: &Node,
    visit: &mut dyn FnMut(&str, &Node),
) {
    for (key, node) in node.entries() {
        let path = below(prefix, key);
        let inner = schema.is_section(&path) && matches!(node.value, Value::Table(_));
        let open = schema.is_open(&path);
        if inner && !open {
            section(doc, schema, &path, node, visit);
        } else if !(doc.dialect.is_python() && is_local(schema, &path)) {
            visit(&path, node);
        }
    }
}

/// Reports placeholders that an export left for the user to fill in.
fn left_open(doc: &Document, prefix: &str, node: &Node, findings: &mut Vec<Finding>) {
    match &node.value {
        Value::Str(text) | Value::Expression(text) if text.contains(PLACEHOLDER) => {
            findings.push(Finding {
                severity: Severity::Error,
                path: doc.path.clone(),
                line: node.line,
                key: prefix.to_owned(),
                message: format!("{} is still to be filled in", node.value.shown()),
            });
        }
        Value::Table(entries) | Value::Call(_, entries) => {
            for (key, node) in entries {
                left_open(doc, &below(prefix, key), node, findings);
            }
        }
        Value::List(items) => {
            for item in items {
                left_open(doc, prefix, item, findings);
            }
        }
        _ => {}
    }
}

/// Number of findings after which unknown keys get no suggestion. A suggestion compares the key
/// with all keys of the schema, and a file with more findings was written for another system.
const MOST_HINTS: usize = 100;

fn value(doc: &Document, schema: &Schema, key: &str, node: &Node, findings: &mut Vec<Finding>) {
    let hints = findings.len() < MOST_HINTS;
    let mut found = |severity: Severity, message: String| {
        findings.push(Finding {
            severity,
            path: doc.path.clone(),
            line: node.line,
            key: key.to_owned(),
            message,
        });
    };
    match schema.kind(key) {
        Some(kind) if kind.accepts(node) => {}
        // Python asks no field for its type, and reads every number but 0 as true.
        Some(Kind::Bool) if doc.dialect.is_python() && matches!(node.value, Value::Int(_)) => {
            let on = node.int() != Some(0);
            let message = format!("{} is read as {on}", node.value.shown());
            found(Severity::Warning, message);
        }
        // An environment variable, whose value is unknown here.
        Some(_) if matches!(&node.value, Value::Str(text) if text.starts_with('$')) => {}
        Some(kind) => {
            let near = match &node.value {
                Value::Str(text) => kind
                    .words_of()
                    .and_then(|w| catalog::suggest::nearest(text, w)),
                _ => None,
            };
            let hint = near.map_or_else(String::new, |word| format!("; did you mean `{word}`?"));
            // The option has no value: another option follows it.
            let bare = key.starts_with("--") && node.value == Value::Bool(true);
            let shown = match bare {
                true => "no value".to_owned(),
                false => node.value.shown(),
            };
            let message = format!("{shown} where {} is expected{hint}", kind.words());
            found(Severity::Error, message);
        }
        // A section that is empty, or filled in elsewhere.
        None if schema.is_section(key)
            && matches!(node.value, Value::Null | Value::Expression(_)) => {}
        None if schema.is_section(key) => {
            let message = format!("{} where a section is expected", node.value.shown());
            found(Severity::Error, message);
        }
        None => {
            let nearest = hints.then(|| schema.nearest(key)).flatten();
            let hint = nearest.map_or_else(
                || format!("{} has no such key", doc.dialect.name()),
                |k| format!("unknown to {}; did you mean `{k}`?", doc.dialect.name()),
            );
            match ignored(doc.dialect).filter(|_| !schema.misspells(key)) {
                Some(why) => found(Severity::Warning, format!("{hint} ({why})")),
                None => found(Severity::Error, hint),
            }
        }
    }
}

/// What becomes of an unknown key, where it only deserves a warning; `None` where it is an error.
fn ignored(dialect: Dialect) -> Option<&'static str> {
    match dialect {
        Dialect::Axolotl => Some("axolotl drops it"),
        Dialect::MegatronBridge => Some("nothing reads it"),
        Dialect::Transformers | Dialect::TransformersDeepSpeed => {
            Some("an argument of the script itself, or unknown")
        }
        _ => None,
    }
}

/// Whether this is a local variable of a Python file: a name without dots, not in the schema.
fn is_local(schema: &Schema, path: &str) -> bool {
    !path.contains('.') && schema.kind(path).is_none() && !schema.is_section(path)
}
