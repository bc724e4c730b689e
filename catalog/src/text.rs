//! Reading YAML and JSON strictly: the only module that uses the parsers.

use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::SpecError;

/// Largest file that is read, so that a wrong path cannot exhaust memory.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a file's text.
///
/// # Errors
/// When it cannot be read, is too large, or is not UTF-8.
pub fn read(path: &Path) -> Result<String, SpecError> {
    let shown = path.display().to_string();
    let unreadable = |reason: String| SpecError::Unreadable {
        path: shown.clone(),
        reason,
    };
    let said = |e: std::io::Error| match e.kind() {
        ErrorKind::NotFound => "there is no such file".to_owned(),
        ErrorKind::IsADirectory => "it is a folder, not a file".to_owned(),
        _ => e.to_string(),
    };
    let file = std::fs::File::open(path).map_err(|e| unreadable(said(e)))?;
    let mut bytes = Vec::new();
    // A device or pipe has no size before it is read, so the limit is on the bytes read.
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| unreadable(said(e)))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(unreadable(format!(
            "larger than {MAX_BYTES} bytes, the most that is read"
        )));
    }
    String::from_utf8(bytes).map_err(|e| {
        unreadable(format!(
            "not UTF-8 text at byte {}",
            e.utf8_error().valid_up_to()
        ))
    })
}

/// Parses YAML; `path` is for error messages.
///
/// # Errors
/// Malformed text, with line, column and field if the parser gives them.
pub fn yaml<T: DeserializeOwned>(text: &str, path: &str) -> Result<T, SpecError> {
    not_empty(text, path)?;
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_nodes: 4_000_000, max_events: 8_000_000, max_depth: 64 },
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|e| SpecError::Malformed {
        path: path.to_owned(),
        message: with_source(&one_line(&e.to_string()), text),
    })
}

/// Parses JSON; `path` is for error messages.
///
/// # Errors
/// With line and column.
pub fn json<T: DeserializeOwned>(text: &str, path: &str) -> Result<T, SpecError> {
    not_empty(text, path)?;
    serde_json::from_str(text).map_err(|e| SpecError::Malformed {
        path: path.to_owned(),
        message: one_line(&e.to_string()),
    })
}

/// Refuses an empty file; a parser's message would only say where it ends.
fn not_empty(text: &str, path: &str) -> Result<(), SpecError> {
    match text.trim().is_empty() {
        false => Ok(()),
        true => Err(SpecError::Malformed {
            path: path.to_owned(),
            message: "the file is empty".to_owned(),
        }),
    }
}

/// Turns a parser's message into one that begins with `line N column M` and quotes that line, so that it names the
/// field; types are given in words.
fn with_source(message: &str, text: &str) -> String {
    let words = [
        ("invalid u64", "expected a whole number"),
        ("invalid u32", "expected a whole number"),
        ("invalid f64", "expected a number"),
        ("invalid bool", "expected true or false"),
        ("expected string scalar", "expected one value"),
        ("expected mapping start", "expected keys with values"),
    ];
    let mut message = message.trim_start_matches("error: ").to_owned();
    // Cuts advice that is meant for programmers who use the parser.
    if let Some(at) = message.find(", set DuplicateKeyPolicy") {
        message.truncate(at);
    }
    for (parser, ours) in words {
        message = message.replace(parser, ours);
    }
    let number = message
        .strip_prefix("line ")
        .and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    let line = number.and_then(|n| text.lines().nth(n.checked_sub(1)?));
    match line.map(str::trim).filter(|line| !line.is_empty()) {
        Some(line) => {
            let shown: String = line.chars().take(60).collect();
            format!("{message}, in `{shown}`")
        }
        None => message,
    }
}

/// The first line of a parser's message; the rest draws the source.
fn one_line(message: &str) -> String {
    let mut lines = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    lines.next().unwrap_or("malformed").to_owned()
}
