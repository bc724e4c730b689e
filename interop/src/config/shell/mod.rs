//! Parser of launch scripts and argument files, for the part of shell syntax that they use: comments, quotes,
//! continuation lines, assignments, arrays, `$VAR`, `${VAR:-default}`, `"${ARRAY[@]}"`, `source FILE`. Nothing is
//! executed; what would need execution stays text.

mod expand;
mod lexer;
mod script;

pub use self::script::{Script, Word};

use self::expand::{expand, joined};
use self::lexer::{Lexer, Piece, Raw, Token, is_name};
use super::error::SyntaxError;

/// Reads a script. `include` returns the text of a sourced file by its base name, if it exists.
///
/// # Errors
/// An unclosed quote or bracket, with its line.
pub fn parse(
    text: &str,
    path: &str,
    include: &dyn Fn(&str) -> Option<String>,
) -> Result<Script, SyntaxError> {
    let mut script = Script::default();
    run(text, path, include, &mut script, 0)?;
    Ok(script)
}

fn run(
    text: &str,
    path: &str,
    include: &dyn Fn(&str) -> Option<String>,
    script: &mut Script,
    depth: usize,
) -> Result<(), SyntaxError> {
    let tokens = Lexer::new(text, path).tokens()?;
    let mut command: Vec<Word> = Vec::new();
    let mut index = 0;
    while let Some(token) = tokens.get(index) {
        index += 1;
        match token {
            Token::End | Token::Open | Token::Close => {
                finish(&mut command, path, include, script, depth)?;
            }
            Token::Word(raw) => {
                let array = matches!(tokens.get(index), Some(Token::Open));
                if command.is_empty()
                    && let Some((name, append, rest)) = assignment(raw)
                {
                    let words = if array {
                        let (words, after) = elements(&tokens, index + 1, path, raw.line, script)?;
                        index = after;
                        words
                    } else {
                        script.made(joined(&rest, script), path, raw.line)?
                    };
                    let slot = script.variables.entry(name).or_default();
                    if append && array {
                        slot.extend(words);
                    } else if append {
                        let line = raw.line;
                        let before = slot.first().map_or("", |w| w.text.as_str());
                        let after = words.first().map_or("", |w| w.text.as_str());
                        let text = format!("{before}{after}");
                        *slot = vec![Word { text, line }];
                    } else {
                        *slot = words;
                    }
                } else {
                    command.extend(script.made(expand(raw, script), path, raw.line)?);
                }
            }
        }
    }
    finish(&mut command, path, include, script, depth)
}

fn finish(
    command: &mut Vec<Word>,
    path: &str,
    include: &dyn Fn(&str) -> Option<String>,
    script: &mut Script,
    depth: usize,
) -> Result<(), SyntaxError> {
    let words = std::mem::take(command);
    let Some(first) = words.first() else {
        return Ok(());
    };
    if matches!(first.text.as_str(), "source" | ".") && depth < 8 {
        let base = words.get(1).and_then(|w| w.text.rsplit('/').next());
        if let Some(text) = base.and_then(include) {
            let inner = base.unwrap_or(path).to_owned();
            return run(&text, &inner, include, script, depth + 1);
        }
    }
    script.commands.push(words);
    Ok(())
}

/// Reads `NAME=…` or `NAME+=…` at the start of a command, also after `export`.
fn assignment(raw: &Raw) -> Option<(String, bool, Raw)> {
    let Some(Piece::Text(text, false)) = raw.pieces.first() else {
        return None;
    };
    let (name, value) = text.split_once('=')?;
    let (name, append) = match name.strip_suffix('+') {
        Some(name) => (name, true),
        None => (name, false),
    };
    let mut letters = name.chars();
    let head = letters.next()?;
    if !(head.is_ascii_alphabetic() || head == '_') || !letters.all(is_name) {
        return None;
    }
    let mut rest = raw.clone();
    rest.pieces[0] = Piece::Text(value.to_owned(), true);
    Some((name.to_owned(), append, rest))
}

fn elements(
    tokens: &[Token],
    mut index: usize,
    path: &str,
    line: usize,
    script: &mut Script,
) -> Result<(Vec<Word>, usize), SyntaxError> {
    let mut words = Vec::new();
    loop {
        match tokens.get(index) {
            None => return Err(SyntaxError::new(path, line, "`(` is not closed")),
            Some(Token::Close) => return Ok((words, index + 1)),
            Some(Token::Word(raw)) => {
                words.extend(script.made(expand(raw, script), path, raw.line)?);
            }
            Some(Token::End | Token::Open) => {}
        }
        index += 1;
    }
}
