//! Names from outside: which are taken, and how they are shown.
//!
//! The names of models, clusters, devices and runtimes come from files and folders and go into messages,
//! reports, scripts and configurations. A control character has no place in a name and is refused.

use crate::error::SpecError;

/// A name, or that it holds a control character; `path` and `field` say where it stands.
///
/// # Errors
/// When a character of it would move a cursor, end a line or turn the direction of text.
pub fn checked<'a>(name: &'a str, path: &str, field: &str) -> Result<&'a str, SpecError> {
    if !name.chars().any(is_control) {
        return Ok(name);
    }
    Err(SpecError::Field {
        path: shown(path),
        field: field.to_owned(),
        message: format!(
            "the name `{}` holds a control character; expected letters, digits, signs and spaces",
            shown(name)
        ),
    })
}

/// A text for one line of a message: control characters are written as `\u{…}`.
#[must_use]
pub fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_control(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// What a terminal, an editor or a line-based format acts on instead of showing it: C0 and C1 controls, the
/// separators of lines and paragraphs, and the marks that turn the direction of text.
#[must_use]
pub fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{feff}'
        )
        || ('\u{202a}'..='\u{202e}').contains(&c)
        || ('\u{2066}'..='\u{2069}').contains(&c)
}
