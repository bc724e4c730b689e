//! Splits a shell script into words, before expansion.

use crate::config::error::SyntaxError;

#[derive(Clone, Debug)]
pub(super) enum Token {
    Word(Raw),
    Open,
    Close,
    End,
}

/// A word as written: a list of pieces, each literal or to be expanded.
#[derive(Clone, Debug)]
pub(super) struct Raw {
    pub(super) pieces: Vec<Piece>,
    pub(super) line: usize,
}

#[derive(Clone, Debug)]
pub(super) enum Piece {
    /// Literal text, and whether it was quoted.
    Text(String, bool),
    /// `$name`, `${name:-default}` or `${name[@]}`, quoted or not.
    Variable {
        name: String,
        default: Option<String>,
        quoted: bool,
    },
}

pub(super) fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

pub(super) struct Lexer<'a> {
    chars: std::iter::Peekable<std::str::Chars<'a>>,
    path: &'a str,
    line: usize,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str, path: &'a str) -> Self {
        Self {
            chars: text.chars().peekable(),
            path,
            line: 1,
        }
    }

    fn next(&mut self) -> Option<char> {
        let c = self.chars.next();
        if c == Some('\n') {
            self.line += 1;
        }
        c
    }

    pub(super) fn tokens(mut self) -> Result<Vec<Token>, SyntaxError> {
        let mut tokens = Vec::new();
        while let Some(&c) = self.chars.peek() {
            match c {
                '\n' | ';' | '|' | '&' => {
                    self.next();
                    tokens.push(Token::End);
                }
                ' ' | '\t' | '\r' => {
                    self.next();
                }
                '#' => {
                    while self.chars.peek().is_some_and(|&c| c != '\n') {
                        self.next();
                    }
                }
                '(' => {
                    self.next();
                    tokens.push(Token::Open);
                }
                ')' => {
                    self.next();
                    tokens.push(Token::Close);
                }
                _ => {
                    let raw = self.word()?;
                    let skip = matches!(raw.pieces.as_slice(), [Piece::Text(t, false)] if t == "export" || t == "declare" || t == "local");
                    if !raw.pieces.is_empty() && !skip {
                        tokens.push(Token::Word(raw));
                    }
                }
            }
        }
        Ok(tokens)
    }

    fn word(&mut self) -> Result<Raw, SyntaxError> {
        let line = self.line;
        let mut pieces = Vec::new();
        let mut text = String::new();
        while let Some(&c) = self.chars.peek() {
            match c {
                ' ' | '\t' | '\r' | '\n' | ';' | '|' | '&' | '(' | ')' => break,
                '\\' => {
                    self.next();
                    match self.next() {
                        Some('\n') | None => {}
                        Some('\r') => {
                            if self.chars.peek() == Some(&'\n') {
                                self.next();
                            }
                        }
                        Some(c) => text.push(c),
                    }
                }
                '\'' => {
                    self.next();
                    push(&mut pieces, &mut text);
                    let quoted = self.until('\'', line)?;
                    pieces.push(Piece::Text(quoted, true));
                }
                '"' => {
                    self.next();
                    push(&mut pieces, &mut text);
                    self.double(&mut pieces, line)?;
                }
                '$' => {
                    self.next();
                    push(&mut pieces, &mut text);
                    pieces.push(self.variable(false)?);
                }
                '`' => {
                    self.next();
                    text.push_str(&self.until('`', line)?);
                }
                _ => {
                    self.next();
                    text.push(c);
                }
            }
        }
        push(&mut pieces, &mut text);
        Ok(Raw { pieces, line })
    }

    fn until(&mut self, end: char, line: usize) -> Result<String, SyntaxError> {
        let mut text = String::new();
        loop {
            match self.next() {
                Some(c) if c == end => return Ok(text),
                Some(c) => text.push(c),
                None => {
                    return Err(SyntaxError::new(
                        self.path,
                        line,
                        format!("{end} is not closed"),
                    ));
                }
            }
        }
    }

    /// Reads the rest of `${…}`, with nested braces.
    fn braces(&mut self, line: usize) -> Result<String, SyntaxError> {
        let mut text = String::new();
        let mut depth = 1;
        loop {
            let Some(c) = self.next() else {
                return Err(SyntaxError::new(self.path, line, "`${` is not closed"));
            };
            depth += i32::from(c == '{') - i32::from(c == '}');
            if depth == 0 {
                return Ok(text);
            }
            text.push(c);
        }
    }

    fn double(&mut self, pieces: &mut Vec<Piece>, line: usize) -> Result<(), SyntaxError> {
        let mut text = String::new();
        let before = pieces.len();
        loop {
            match self.next() {
                None => return Err(SyntaxError::new(self.path, line, "\" is not closed")),
                Some('"') => break,
                Some('\\') => match self.next() {
                    Some('\n') | None => {}
                    Some(c @ ('"' | '\\' | '$' | '`')) => text.push(c),
                    Some(c) => text.extend(['\\', c]),
                },
                Some('$') => {
                    if !text.is_empty() {
                        pieces.push(Piece::Text(std::mem::take(&mut text), true));
                    }
                    pieces.push(self.variable(true)?);
                }
                Some(c) => text.push(c),
            }
        }
        if !text.is_empty() || pieces.len() == before {
            pieces.push(Piece::Text(text, true));
        }
        Ok(())
    }

    /// Reads what follows a `$`.
    fn variable(&mut self, quoted: bool) -> Result<Piece, SyntaxError> {
        let named = |name: String| Piece::Variable {
            name,
            default: None,
            quoted,
        };
        match self.chars.peek() {
            Some('{') => self.braced(quoted),
            Some('(') => {
                let text = self.parentheses()?;
                Ok(if text.starts_with("$((") {
                    named(text)
                } else {
                    Piece::Text(text, quoted)
                })
            }
            Some('@' | '*') => {
                self.next();
                Ok(named("@[@]".to_owned()))
            }
            Some(&c) if is_name(c) => {
                let mut name = String::new();
                while let Some(c) = self.chars.next_if(|&c| is_name(c)) {
                    name.push(c);
                }
                Ok(named(name))
            }
            _ => Ok(Piece::Text("$".to_owned(), quoted)),
        }
    }

    /// Reads `{name}`, `{name:-default}` or `{name[@]}` after a `$`.
    fn braced(&mut self, quoted: bool) -> Result<Piece, SyntaxError> {
        let line = self.line;
        self.next();
        let inner = self.braces(line)?;
        let end = inner.find(|c: char| !is_name(c)).unwrap_or(inner.len());
        let (name, rest) = inner.split_at(end);
        let default = [":-", "-", ":="]
            .iter()
            .find_map(|op| rest.strip_prefix(op));
        let array = rest.starts_with("[@]") || rest.starts_with("[*]");
        let name = if array {
            format!("{name}[@]")
        } else {
            name.to_owned()
        };
        let default = default.map(|text| text.trim_matches(['"', '\'']).to_owned());
        Ok(Piece::Variable {
            name,
            default,
            quoted,
        })
    }

    /// Reads `(…)` or `((…))` after a `$`, as text.
    fn parentheses(&mut self) -> Result<String, SyntaxError> {
        let line = self.line;
        let mut depth = 0;
        let mut text = String::from("$");
        loop {
            let Some(c) = self.next() else {
                return Err(SyntaxError::new(self.path, line, "`$(` is not closed"));
            };
            text.push(c);
            depth += i32::from(c == '(') - i32::from(c == ')');
            if depth == 0 {
                return Ok(text);
            }
        }
    }
}

fn push(pieces: &mut Vec<Piece>, text: &mut String) {
    if !text.is_empty() {
        pieces.push(Piece::Text(std::mem::take(text), false));
    }
}
