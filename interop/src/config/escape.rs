//! Escapes text from outside, with one function for every kind of place in a written file.
//!
//! Names and paths may hold anything that a file system takes. Exporters must write them into scripts and
//! configurations through these functions.

use catalog::names::is_control;

/// A word of a shell script or command, in single quotes where the shell would interpret it.
#[must_use]
pub fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:+=@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// A path as a word of a command: one that begins with a dash as `./-…`, which no command takes for an option.
#[must_use]
pub fn path(path: &str) -> String {
    match path.starts_with('-') {
        true => shell(&format!("./{path}")),
        false => shell(path),
    }
}

/// An option with its value; `=` is between them where the value begins with a dash, which would be read as an option.
#[must_use]
pub fn option(name: &str, value: &str) -> String {
    let between = if value.starts_with('-') { '=' } else { ' ' };
    format!("--{name}{between}{}", shell(value))
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

/// A regular expression as a Python literal: a raw string, which reads best, where possible.
#[must_use]
pub fn python_pattern(text: &str) -> String {
    if text.contains('"') || text.ends_with('\\') || text.chars().any(is_control) {
        quoted(text)
    } else {
        format!("r\"{text}\"")
    }
}

/// Makes a text safe to stand in a comment of any format: line breaks and control characters in it are replaced, so
/// that it cannot end the comment's line.
#[must_use]
pub fn comment(text: &str) -> String {
    catalog::names::shown(text)
}

/// Text between the three double quotes of a Python docstring.
#[must_use]
pub fn docstring(text: &str) -> String {
    comment(text).replace('\\', r"\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_begins_with_a_dash_is_no_option() {
        for (name, written) in [
            ("a.yaml", "a.yaml"),
            ("-a.yaml", "./-a.yaml"),
            ("-a b.yaml", "'./-a b.yaml'"),
            ("./-a.yaml", "./-a.yaml"),
        ] {
            assert_eq!(path(name), written);
        }
        assert_eq!(option("model", "gpt2"), "--model gpt2");
        assert_eq!(option("model", "-m.json"), "--model=-m.json");
    }
}
