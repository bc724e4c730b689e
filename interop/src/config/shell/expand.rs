//! Expansion of words: substitutes variables, arrays and products.

use super::lexer::{Piece, Raw};
use super::script::{MAX_TEXT, Script, Word};

/// Expands without word splitting, as in an assignment; `None` when the result is too long.
pub(super) fn joined(raw: &Raw, script: &Script) -> Option<Vec<Word>> {
    let mut text = String::new();
    for piece in &raw.pieces {
        match piece {
            Piece::Text(t, _) => text.push_str(t),
            Piece::Variable { name, default, .. } => {
                text.push_str(&value(name, default.as_deref(), script).join(" "));
            }
        }
        if text.len() > MAX_TEXT {
            return None;
        }
    }
    let line = raw.line;
    Some(vec![Word { text, line }])
}

/// Expands with splitting of unquoted variables; `"${A[@]}"` keeps its words. Words of an array keep the line where
/// they were written. `None` when the result is too long.
pub(super) fn expand(raw: &Raw, script: &Script) -> Option<Vec<Word>> {
    let mut words: Vec<Word> = Vec::new();
    let mut length = 0;
    let mut current: Option<Word> = None;
    let empty = |line| Word {
        text: String::new(),
        line,
    };
    for piece in &raw.pieces {
        let parts = match piece {
            Piece::Text(t, quoted) if *quoted || !t.is_empty() => vec![Word {
                text: t.clone(),
                line: raw.line,
            }],
            Piece::Text(..) => Vec::new(),
            Piece::Variable {
                quoted: true, name, ..
            } if !name.ends_with("[@]") => joined(
                &Raw {
                    pieces: vec![piece.clone()],
                    line: raw.line,
                },
                script,
            )?,
            Piece::Variable {
                name,
                default,
                quoted,
            } => {
                let words = words_of(name, default.as_deref(), raw.line, script);
                if *quoted { words } else { split(&words) }
            }
        };
        for (i, part) in parts.into_iter().enumerate() {
            length += part.text.len() + 1;
            if length > MAX_TEXT {
                return None;
            }
            if i > 0 {
                words.extend(current.take());
            }
            let word = current.get_or_insert_with(|| empty(part.line));
            word.text.push_str(&part.text);
        }
    }
    words.extend(current);
    Some(words)
}

fn split(words: &[Word]) -> Vec<Word> {
    let parts = words.iter().flat_map(|word| {
        let parts = word.text.split_whitespace();
        parts.map(|part| Word {
            text: part.to_owned(),
            line: word.line,
        })
    });
    parts.collect()
}

fn words_of(name: &str, default: Option<&str>, line: usize, script: &Script) -> Vec<Word> {
    let plain = name.trim_end_matches("[@]");
    match script.variables.get(plain) {
        Some(words) => words.clone(),
        None => {
            let values = value(name, default, script).into_iter();
            values.map(|text| Word { text, line }).collect()
        }
    }
}

fn value(name: &str, default: Option<&str>, script: &Script) -> Vec<String> {
    if name.starts_with("$((") {
        return vec![product(name, script).unwrap_or_else(|| name.to_owned())];
    }
    let plain = name.trim_end_matches("[@]");
    match script.variables.get(plain) {
        Some(words) => words.iter().map(|w| w.text.clone()).collect(),
        None if name.ends_with(']') => Vec::new(),
        None => match default {
            Some(default) => vec![default.to_owned()],
            // The value of an environment variable is unknown; its name stays visible.
            None if plain == "@" => Vec::new(),
            None => vec![format!("${plain}")],
        },
    }
}

/// Evaluates `$((A*B))` of integers and variables that hold integers; anything else stays text.
fn product(text: &str, script: &Script) -> Option<String> {
    let inner = text.strip_prefix("$((")?.strip_suffix("))")?;
    let factor = |part: &str| {
        let name = part.trim().trim_start_matches('$').trim_matches(['{', '}']);
        let held = script.variables.get(name).and_then(|words| words.first());
        held.map_or(name, |word| word.text.as_str())
            .parse::<u64>()
            .ok()
    };
    let product = inner
        .split('*')
        .try_fold(1u64, |all, part| all.checked_mul(factor(part)?))?;
    Some(product.to_string())
}
