//! Why a file of metrics has no training step: its JSON is broken, or a metric is no number.

use serde_json::Value;

use super::log::LogError;
use super::metrics::{Item, of_csv, quantity};

/// The error for a text in which no training step is found.
pub(super) fn without_steps(text: &str, path: &str) -> LogError {
    let items = match looks_like_json(text) {
        true => match of_json(text, path) {
            Ok(items) => items,
            Err(broken) => return broken,
        },
        false => of_csv(text).unwrap_or_default(),
    };
    wrong_number(&items, path).unwrap_or_else(|| LogError::NoSteps {
        path: path.to_owned(),
    })
}

/// Whether a text begins as an object or a list of objects or lists does. Lines of logs begin as `[rank0]:` or `[2026-01-01 …]`.
fn looks_like_json(text: &str) -> bool {
    let begin: String = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .take(2)
        .collect();
    ["{\"", "{}", "[{", "[["].contains(&begin.as_str())
}

/// The objects of JSON: one, a list of them, or one a line. Other lines between those of objects are left out.
fn of_json(text: &str, path: &str) -> Result<Vec<Item>, LogError> {
    let first = text.trim_start().lines().next().unwrap_or_default();
    let is_lines = serde_json::from_str::<Value>(first).is_ok_and(|value| value.is_object());
    if !is_lines {
        let value = parsed(text, path, 0)?;
        let items = match value {
            Value::Array(items) => items,
            one => vec![one],
        };
        return Ok(items.into_iter().map(|item| (0, fields(item))).collect());
    }
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| line.trim_start().starts_with('{'));
    lines
        .map(|(before, line)| Ok((before + 1, fields(parsed(line, path, before)?))))
        .collect()
}

fn fields(item: Value) -> Option<serde_json::Map<String, Value>> {
    match item {
        Value::Object(fields) => Some(fields),
        _ => None,
    }
}

/// Parses text that begins `before` lines into its file.
fn parsed(text: &str, path: &str, before: usize) -> Result<Value, LogError> {
    serde_json::from_str(text).map_err(|error| {
        let said = error.to_string();
        let reason = said.split(" at line ").next().unwrap_or_default();
        // If the text ends too early, the error is placed at the end of its last line.
        let last = text.lines().count().max(1);
        let (line, column) = match error.line() <= last {
            true => (error.line().max(1), error.column()),
            false => (
                last,
                text.lines().last().map_or(0, |line| line.chars().count()),
            ),
        };
        LogError::Json {
            path: path.to_owned(),
            line: before + line,
            column,
            reason: match error.is_eof() {
                true => "it ends too early".to_owned(),
                false => reason.to_owned(),
            },
        }
    })
}

/// The error for the first metric whose name is known and whose value is not a number; `None` if all are numbers.
fn wrong_number(items: &[Item], path: &str) -> Option<LogError> {
    let all = items.iter();
    let mut all = all.flat_map(|(line, fields)| fields.iter().flatten().map(move |of| (*line, of)));
    let (line, (name, value)) = all.find(|(_, (name, value))| {
        !value.is_number() && !value.is_null() && quantity(name).is_some()
    })?;
    let found = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some(LogError::Number {
        path: path.to_owned(),
        line,
        field: name.chars().take(80).collect(),
        found: found.chars().take(40).collect(),
        expected: "a number",
    })
}
