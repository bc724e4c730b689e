//! Names from outside: which are accepted, and how they are shown.
//!
//! Names of models, clusters, devices and runtimes come from files and folders and go into messages, reports, scripts
//! and configurations. Control characters in them are refused.

use crate::error::SpecError;

/// Returns a name unless it holds a control character; `path` and `field` locate it in the error.
///
/// # Errors
/// When one of its characters would move a cursor, end a line or change the direction of text.
pub fn checked<'a>(name: &'a str, path: &str, field: &str) -> Result<&'a str, SpecError> {
    let wrong = |message| SpecError::field(shown(path), field, message);
    printable(name).map(|()| name).map_err(wrong)
}

/// Refuses a name that holds a control character, in words.
pub(crate) fn printable(name: &str) -> Result<(), String> {
    if !name.chars().any(is_control) {
        return Ok(());
    }
    Err(format!(
        "the name `{}` holds a control character; expected letters, digits, signs and spaces",
        shown(name)
    ))
}

/// Whether `arg` is a name or one of its aliases, in letters of either case.
pub(crate) fn same<S: AsRef<str>>(name: &str, aliases: &[S], arg: &str) -> bool {
    let mut aliases = aliases.iter().map(AsRef::as_ref);
    name.eq_ignore_ascii_case(arg) || aliases.any(|alias| alias.eq_ignore_ascii_case(arg))
}

/// A text for one line of a message: control characters are escaped, such as `\n` or `\u{200e}`.
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

/// Whether a terminal, an editor or a line-based format acts on a character instead of showing it: C0 and C1 controls,
/// line and paragraph separators, and marks that change the direction of text.
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
