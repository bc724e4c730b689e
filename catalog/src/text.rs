//! Reading YAML and JSON strictly: the only module that uses the parsers.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

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

/// Parses JSON into a tree, in which no object has a key twice; `path` is for error messages.
///
/// # Errors
/// With line and column.
pub fn json_value(text: &str, path: &str) -> Result<Value, SpecError> {
    json(text, path).map(|Distinct(value)| value)
}

/// JSON text in which `Infinity`, `-Infinity` and `NaN`, which Python writes and JSON has not, are `null`. Lines stay as they are.
#[must_use]
pub fn finite(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    let mut rest = text;
    let (mut quoted, mut escaped) = (false, false);
    while let Some(letter) = rest.chars().next() {
        let number = ["-Infinity", "Infinity", "NaN"]
            .into_iter()
            .find(|number| !quoted && rest.starts_with(number));
        if let Some(number) = number {
            found.push_str("null");
            rest = &rest[number.len()..];
            continue;
        }
        quoted ^= letter == '"' && !escaped;
        escaped = quoted && letter == '\\' && !escaped;
        found.push(letter);
        rest = &rest[letter.len_utf8()..];
    }
    found
}

/// A JSON value in which no object repeats a key. `serde_json::Value` itself would silently keep the last value of a repeated key.
struct Distinct(Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        source.deserialize_any(Tree).map(Self)
    }
}

/// Reads a JSON value and refuses repeated keys.
struct Tree;

impl<'de> Visitor<'de> for Tree {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Distinct(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("duplicate key `{key}`")));
            }
            let Distinct(value) = entries.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
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
/// field; what was expected is said in words.
fn with_source(message: &str, text: &str) -> String {
    let mut message = message.trim_start_matches("error: ").to_owned();
    // Cuts advice that is meant for programmers who use the parser.
    if let Some(at) = message.find(", set DuplicateKeyPolicy") {
        message.truncate(at);
    }
    let said = message.find(": ").map_or(0, |at| at + ": ".len());
    if let Some((what, expected)) = in_words(&message[said..]) {
        message = format!("{}{what}; expected {expected}", &message[..said]);
    }
    let number = message
        .strip_prefix("line ")
        .and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    let line = number.and_then(|n| text.lines().nth(n.checked_sub(1)?));
    // The parser reports a missing field at the last field that is there, so its line is not where the field belongs.
    if let Some(number) = number.filter(|_| message[said..].starts_with("missing field"))
        && line.is_some_and(|line| !line.contains('{'))
    {
        return missing(&message[said..], number, text);
    }
    match line.map(str::trim).filter(|line| !line.is_empty()) {
        Some(line) => {
            let shown: String = line.chars().take(60).collect();
            format!("{message}, in `{shown}`")
        }
        None => message,
    }
}

/// The message for a missing field. The parser names line `number`, where another field of the same object stands; the message names
/// the line that opens the object.
fn missing(message: &str, number: usize, text: &str) -> String {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<&str> = text.lines().take(number).collect();
    let own = lines.last().map_or(0, |line| indent(line));
    let above = lines.iter().enumerate().rev();
    let mut above = above.filter(|(_, line)| !line.trim().is_empty());
    match above.find(|(_, line)| indent(line) < own) {
        Some((before, line)) => {
            let shown: String = line.trim().chars().take(60).collect();
            format!("line {}: {message}, in `{shown}`", before + 1)
        }
        None => message.to_owned(),
    }
}

/// What is wrong and what was expected, for messages of the parser that name its own types, events or functions.
fn in_words(said: &str) -> Option<(&'static str, &'static str)> {
    const VALUE: &str = "the value cannot be taken";
    let known = [
        ("invalid boolean", VALUE, "true or false"),
        ("invalid floating point", VALUE, "a number"),
        ("cannot deserialize null", "no value is given", "one value"),
        ("expected string scalar", VALUE, "one value"),
        ("expected scalar", VALUE, "one value"),
        ("expected sequence start", VALUE, "a list"),
        ("expected mapping start", VALUE, "keys with values"),
        (
            "multiple YAML documents",
            "a second document begins here",
            "one document in a file",
        ),
    ];
    // Types of whole numbers, such as `u64`.
    let kind = said.strip_prefix("invalid ");
    let bits = kind.and_then(|kind| kind.strip_prefix(['u', 'i']));
    if bits.is_some_and(|bits| bits.starts_with(|c: char| c.is_ascii_digit())) {
        return Some((VALUE, "a whole number"));
    }
    let found = known
        .into_iter()
        .find(|(begin, ..)| said.starts_with(begin));
    found.map(|(_, what, expected)| (what, expected))
}

/// The first line of a parser's message; the rest draws the source.
fn one_line(message: &str) -> String {
    let mut lines = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    lines.next().unwrap_or("malformed").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code, reason = "only mistakes are looked at")]
    struct Sample {
        on: bool,
        count: u64,
        share: f64,
        name: String,
        list: Vec<u64>,
        inner: std::collections::BTreeMap<String, u64>,
    }

    #[test]
    fn what_is_missing_is_missing_where_it_belongs() {
        #[derive(Debug, serde::Deserialize)]
        #[allow(dead_code, reason = "only mistakes are looked at")]
        struct Outer {
            inner: Inner,
            last: u64,
        }
        #[derive(Debug, serde::Deserialize)]
        #[allow(dead_code, reason = "only mistakes are looked at")]
        struct Inner {
            tp: u64,
            list: Vec<u64>,
        }
        let check = |text: &str, said: &str| {
            let wrong = yaml::<Outer>(text, "a.yaml").expect_err(text);
            assert_eq!(wrong.mistake().what, said, "{text}");
        };
        check("inner:\n  tp: 1\n  list:\n  - 1\n", "missing field `last`");
        check(
            "first: 1\ninner:\n  list:\n  - 1\nlast: 2\n",
            "line 2: missing field `tp`, in `inner:`",
        );
    }

    #[test]
    fn numbers_that_json_lacks_are_null_outside_texts() {
        let text = "{\"NaN\": [0.0, Infinity, -Infinity],\n\"a\": \"\\\"Infinity\", \"b\": NaN}";
        let expected = "{\"NaN\": [0.0, null, null],\n\"a\": \"\\\"Infinity\", \"b\": null}";
        assert_eq!(finite(text), expected);
    }

    #[test]
    fn the_parser_s_words_are_not_shown() {
        let right = "on: true\ncount: 8\nshare: 0.5\nname: a\nlist: [1]\ninner: {a: 1}\n";
        yaml::<Sample>(right, "a.yaml").expect("right");
        let value = |line| format!("line {line} column");
        for (old, new, line, expected) in [
            ("on: true", "on: 3", 1, "true or false"),
            ("count: 8", "count: 8.0", 2, "a whole number"),
            ("count: 8", "count: -8", 2, "a whole number"),
            ("share: 0.5", "share: half", 3, "a number"),
            ("name: a", "name: [a]", 4, "one value"),
            ("name: a", "name: ~", 4, "one value"),
            ("list: [1]", "list: 1", 5, "a list"),
            ("inner: {a: 1}", "inner: 1", 6, "keys with values"),
            (
                "inner: {a: 1}",
                "inner: {a: 1}\n---\non: true",
                8,
                "one document in a file",
            ),
        ] {
            let wrong = yaml::<Sample>(&right.replacen(old, new, 1), "a.yaml").expect_err(new);
            let wrong = wrong.mistake();
            assert_eq!(wrong.expected.as_deref(), Some(expected), "{new}");
            assert!(
                wrong.what.starts_with(&value(line)),
                "{new}: {}",
                wrong.what
            );
            let words = wrong.what.split_once(": ").map(|(_, words)| words);
            assert!(
                words.is_some_and(|words| words.contains(' ')),
                "{}",
                wrong.what
            );
        }
    }
}
