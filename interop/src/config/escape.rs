//! Text from outside as data: one function for every place that a written file has for it.
//!
//! Names and paths may hold anything that a file system takes. Whoever writes them into a script or a
//! configuration does it by one of these.

use catalog::names::is_control;

/// A word of a shell script or command: single quotes where a shell would read more than text.
#[must_use]
pub fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:+=@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Text between the double quotes of JSON, YAML, TOML and Python, with the escapes that all four share.
#[must_use]
pub fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if is_control(c) => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A regular expression in Python: a raw string, which reads best, where one can hold it.
#[must_use]
pub fn python_pattern(text: &str) -> String {
    if text.contains('"') || text.ends_with('\\') || text.chars().any(is_control) {
        quoted(text)
    } else {
        format!("r\"{text}\"")
    }
}

/// The rest of a line that is a comment in any of the formats: nothing in it ends the line.
#[must_use]
pub fn comment(text: &str) -> String {
    catalog::names::shown(text)
}

/// Text between the three double quotes of a Python docstring.
#[must_use]
pub fn docstring(text: &str) -> String {
    comment(text).replace('\\', r"\\").replace('"', "\\\"")
}
