//! Expansion of words: substitutes variables, arrays and arithmetic.

use super::arithmetic::evaluate;
use super::lexer::{Other, Piece, Raw, is_name};
use super::script::{MAX_TEXT, Script, Word};

/// Expands a word without splitting, as in an assignment; `None` if the result is too long.
pub(super) fn joined(raw: &Raw, script: &Script) -> Option<Vec<Word>> {
    let text = text(&raw.pieces, script)?;
    let line = raw.line;
    Some(vec![Word { text, line }])
}

fn text(pieces: &[Piece], script: &Script) -> Option<String> {
    let mut text = String::new();
    for piece in pieces {
        match piece {
            Piece::Text(t, _) => text.push_str(t),
            _ => {
                for (i, word) in values(piece, 0, script)?.into_iter().enumerate() {
                    text.extend((i > 0).then_some(' '));
                    text.push_str(&word.text);
                }
            }
        }
        if text.len() > MAX_TEXT {
            return None;
        }
    }
    Some(text)
}

/// Expands a word and splits unquoted variables; `"${A[@]}"` keeps its words. Words of an array
/// keep the line where they were written. `None` if the result is too long.
pub(super) fn expand(raw: &Raw, script: &Script) -> Option<Vec<Word>> {
    let line = raw.line;
    let mut words: Vec<Word> = Vec::new();
    let mut length = 0;
    let mut current: Option<Word> = None;
    for piece in &raw.pieces {
        let one = |text: String| vec![Word { text, line }];
        let parts = match piece {
            Piece::Text(text, quoted) if *quoted || !text.is_empty() => one(text.clone()),
            Piece::Text(..) => Vec::new(),
            Piece::Variable { quoted, name, .. } => match (*quoted, name.ends_with("[@]")) {
                (true, false) => one(text(std::slice::from_ref(piece), script)?),
                (true, true) => values(piece, line, script)?,
                (false, _) => {
                    let words = values(piece, line, script)?;
                    words.iter().flat_map(Word::split).collect()
                }
            },
            Piece::Arithmetic(_) => values(piece, line, script)?,
        };
        for (i, part) in parts.into_iter().enumerate() {
            length += part.text.len() + 1;
            if length > MAX_TEXT {
                return None;
            }
            if i > 0 {
                words.extend(current.take());
            }
            let word = current.get_or_insert_with(|| Word {
                text: String::new(),
                line: part.line,
            });
            word.text.push_str(&part.text);
        }
    }
    words.extend(current);
    Some(words)
}

/// The words that a piece expands to; `None` if they are too long. A variable that the script does
/// not set stays as `$name`.
fn values(piece: &Piece, line: usize, script: &Script) -> Option<Vec<Word>> {
    let one = |text: String| Some(vec![Word { text, line }]);
    match piece {
        Piece::Text(text, _) => one(text.clone()),
        Piece::Arithmetic(pieces) => {
            let value = evaluate(&text(pieces, script)?, &|name| number(name, script));
            one(value.map_or_else(|unknown| unknown, |n| n.to_string()))
        }
        Piece::Variable { name, other, .. } => {
            let plain = name.trim_end_matches("[@]");
            let held = script.variables.get(plain);
            let is_set = held.is_some_and(|words| words.iter().any(|w| !w.text.is_empty()));
            match (other, held) {
                (Some(Other::Else(pieces, _)), _) if !is_set => one(text(pieces, script)?),
                (Some(Other::Then(pieces)), _) if is_set => one(text(pieces, script)?),
                (Some(Other::Then(_)), _) => Some(Vec::new()),
                (_, Some(words)) => Some(words.clone()),
                // A script is read as if it was started without arguments.
                (_, None) if plain == "#" => one("0".to_owned()),
                (_, None) if name.ends_with("[@]") => Some(Vec::new()),
                (_, None) => one(format!("${plain}")),
            }
        }
    }
}

/// The whole number that a variable holds, or as an error the text whose value is unknown.
fn number(name: &str, script: &Script) -> Result<i64, String> {
    let held = script.variables.get(name).and_then(|words| words.first());
    let text = held.map_or("", |word| word.text.as_str());
    let unknown = match text.strip_prefix('$') {
        Some(other) if other.chars().all(is_name) => other,
        Some(_) => return Err(text.to_owned()),
        None => name,
    };
    text.parse().map_err(|_| format!("$(({unknown}))"))
}

/// A text as conditions see it: variables that nothing sets are empty.
///
/// # Errors
/// The part that only a run would show, such as a script's argument or the output of a command.
pub(super) fn settled(text: &str, script: &Script) -> Result<String, String> {
    let mut settled = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['$', '`']) {
        settled.push_str(&rest[..at]);
        let name = &rest[at + 1..];
        let end = name.find(|c| !is_name(c)).unwrap_or(name.len());
        let (name, after) = name.split_at(end);
        let digits = name.starts_with(|c: char| c.is_ascii_digit());
        if digits || script.varying.contains(name) {
            return Err(format!("${name}"));
        }
        let other = name.is_empty() && after.starts_with(['(', '{', '?', '$', '!']);
        if other || rest[at..].starts_with('`') {
            return Err(rest[at..].to_owned());
        }
        rest = after;
    }
    settled.push_str(rest);
    Ok(settled)
}
