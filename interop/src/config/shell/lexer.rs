//! Splits a shell script into words, before expansion.

use crate::config::error::SyntaxError;

/// Deepest nesting of expansions.
const MOST_NESTED: usize = 16;

#[derive(Clone, Debug)]
pub(super) enum Token {
    Word(Raw),
    Open,
    Close,
    /// The end of a command: a new line, `;` or `&`.
    End,
    /// `;;`, which ends a branch of `case`.
    Clause,
    And,
    Or,
    Pipe,
    /// `((…))` as a command.
    Arithmetic(Raw),
    /// The lines of a here-document, and the line on which it begins.
    Here(String, usize),
}

/// A word as written: a list of pieces, each literal or to be expanded.
#[derive(Clone, Debug)]
pub(super) struct Raw {
    pub(super) pieces: Vec<Piece>,
    pub(super) line: usize,
}

impl Raw {
    /// The text of a word that is neither quoted nor expanded, such as `if`.
    pub(super) fn bare(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [Piece::Text(text, false)] => Some(text),
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Piece {
    /// Literal text, and whether it was quoted.
    Text(String, bool),
    /// `$name`, `${name[@]}` or `${name:-other}`, quoted or not.
    Variable {
        name: String,
        other: Option<Other>,
        quoted: bool,
    },
    /// `$((…))`.
    Arithmetic(Vec<Piece>),
}

/// What a variable may expand to instead of its value.
#[derive(Clone, Debug)]
pub(super) enum Other {
    /// `${name:-…}`: used if the variable is empty; true if also assigned to it (`${name:=…}`).
    Else(Vec<Piece>, bool),
    /// `${name:+…}`: used if the variable has a value; otherwise the expansion is empty.
    Then(Vec<Piece>),
}

pub(super) fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

pub(super) struct Lexer<'a> {
    chars: std::iter::Peekable<std::str::Chars<'a>>,
    path: &'a str,
    line: usize,
    /// Number of expansions around this text.
    nested: usize,
    /// The ending words of here-documents that begin after this line.
    here: Vec<String>,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str, path: &'a str, line: usize) -> Self {
        Self {
            chars: text.chars().peekable(),
            path,
            line,
            nested: 0,
            here: Vec::new(),
        }
    }

    fn next(&mut self) -> Option<char> {
        let c = self.chars.next();
        if c == Some('\n') {
            self.line += 1;
        }
        c
    }

    /// Whether this text comes next; if so, reads it.
    fn take(&mut self, text: &str) -> bool {
        let mut ahead = self.chars.clone();
        let found = text.chars().all(|c| ahead.next() == Some(c));
        if found {
            self.chars = ahead;
        }
        found
    }

    pub(super) fn tokens(mut self) -> Result<Vec<Token>, SyntaxError> {
        let mut tokens = Vec::new();
        while let Some(&c) = self.chars.peek() {
            match c {
                '\n' => {
                    self.next();
                    tokens.push(Token::End);
                    self.here_documents(&mut tokens);
                }
                ';' | '|' => tokens.push(self.operator(c)),
                '&' if self.take("&>") => {}
                '&' => tokens.push(self.operator(c)),
                ' ' | '\t' | '\r' => {
                    self.next();
                }
                '#' => {
                    while self.chars.peek().is_some_and(|&c| c != '\n') {
                        self.next();
                    }
                }
                '(' => tokens.push(self.open()?),
                ')' => {
                    self.next();
                    tokens.push(Token::Close);
                }
                '<' if !self.take("<<<") && self.take("<<") => {
                    self.take("-");
                    while self.take(" ") {}
                    let end = self.word()?;
                    let text = end.pieces.iter().map(|piece| match piece {
                        Piece::Text(text, _) => text.as_str(),
                        _ => "",
                    });
                    self.here.push(text.collect());
                }
                _ => {
                    let raw = self.word()?;
                    if !raw.pieces.is_empty() {
                        tokens.push(Token::Word(raw));
                    }
                }
            }
        }
        Ok(tokens)
    }

    /// Reads what ends or joins commands.
    fn operator(&mut self, first: char) -> Token {
        self.next();
        let doubled = self.take(&first.to_string());
        match (first, doubled) {
            (';', true) => {
                self.take("&");
                Token::Clause
            }
            ('|', true) => Token::Or,
            ('|', false) => Token::Pipe,
            ('&', true) => Token::And,
            _ => Token::End,
        }
    }

    /// Reads `(`, or all of `((…))`.
    fn open(&mut self) -> Result<Token, SyntaxError> {
        let line = self.line;
        let mut ahead = self.chars.clone();
        if (ahead.next(), ahead.next()) != (Some('('), Some('(')) {
            self.next();
            return Ok(Token::Open);
        }
        let text = self.balanced(['(', ')'])?;
        let inner = text.strip_prefix("((").unwrap_or(&text);
        let inner = inner.strip_suffix("))").unwrap_or(inner);
        let pieces = self.inner(inner)?;
        Ok(Token::Arithmetic(Raw { pieces, line }))
    }

    /// Reads the here-documents that begin on this line.
    fn here_documents(&mut self, tokens: &mut Vec<Token>) {
        for end in std::mem::take(&mut self.here) {
            let begin = self.line;
            let mut text = String::new();
            while self.chars.peek().is_some() {
                let mut line = String::new();
                while let Some(c) = self.next().filter(|&c| c != '\n') {
                    line.push(c);
                }
                if line.trim() == end {
                    break;
                }
                text.push_str(&line);
                text.push('\n');
            }
            tokens.push(Token::Here(text, begin));
        }
    }

    /// Splits the text inside an expansion into pieces, by the rules of double quotes.
    fn inner(&self, text: &str) -> Result<Vec<Piece>, SyntaxError> {
        let nested = self.nested + 1;
        if nested > MOST_NESTED {
            let message = "expansions are nested too deeply";
            return Err(SyntaxError::new(self.path, self.line, message));
        }
        let quoted = format!("{}\"", text.trim_matches(['"', '\'']));
        let mut lexer = Lexer {
            nested,
            ..Lexer::new(&quoted, self.path, self.line)
        };
        let mut pieces = Vec::new();
        lexer.double(&mut pieces, self.line)?;
        Ok(pieces)
    }

    fn word(&mut self) -> Result<Raw, SyntaxError> {
        let line = self.line;
        let mut pieces = Vec::new();
        let mut text = String::new();
        while let Some(&c) = self.chars.peek() {
            match c {
                '&' if text.ends_with(['>', '<']) => {
                    self.next();
                    text.push(c);
                }
                ' ' | '\t' | '\r' | '\n' | ';' | '|' | '&' | '(' | ')' => break,
                '<' if !text.is_empty() && !text.ends_with('<') => break,
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
                    let command = self.until('`', line)?;
                    text.push_str(&format!("$({command})"));
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

    /// Reads from an opening bracket to the one that closes it, as text.
    fn balanced(&mut self, [open, close]: [char; 2]) -> Result<String, SyntaxError> {
        let line = self.line;
        let mut depth = 0;
        let mut text = String::new();
        loop {
            let Some(c) = self.next() else {
                let message = format!("`${open}` is not closed");
                return Err(SyntaxError::new(self.path, line, message));
            };
            text.push(c);
            depth += i32::from(c == open) - i32::from(c == close);
            if depth == 0 {
                return Ok(text);
            }
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
        let named = |name: &str| Piece::Variable {
            name: name.to_owned(),
            other: None,
            quoted,
        };
        match self.chars.peek() {
            Some('{') => self.braced(quoted),
            Some('(') => {
                let text = self.balanced(['(', ')'])?;
                let inner = text.strip_prefix("((").and_then(|t| t.strip_suffix("))"));
                Ok(match inner {
                    Some(inner) => Piece::Arithmetic(self.inner(inner)?),
                    None => Piece::Text(format!("${text}"), quoted),
                })
            }
            Some('@' | '*') => {
                self.next();
                Ok(named("@[@]"))
            }
            Some('#') => {
                self.next();
                Ok(named("#"))
            }
            Some(&c) if is_name(c) => {
                let mut name = String::new();
                while let Some(c) = self.chars.next_if(|&c| is_name(c)) {
                    name.push(c);
                }
                Ok(named(&name))
            }
            _ => Ok(Piece::Text("$".to_owned(), quoted)),
        }
    }

    /// Reads `{name}`, `{name[@]}`, `{name:-other}` and the like after a `$`; others stay text.
    fn braced(&mut self, quoted: bool) -> Result<Piece, SyntaxError> {
        let braces = self.balanced(['{', '}'])?;
        let inner = &braces[1..braces.len() - 1];
        let end = inner.find(|c: char| !is_name(c)).unwrap_or(inner.len());
        let (name, rest) = inner.split_at(end);
        let whole = |end: &str| rest.strip_prefix(end);
        let array = whole("[@]").or(whole("[*]"));
        let operator = array.unwrap_or(rest).trim_start_matches(':');
        let mut letters = operator.chars();
        let other = match letters.next() {
            None => None,
            Some('-') => Some(Other::Else(self.inner(letters.as_str())?, false)),
            Some('=') => Some(Other::Else(self.inner(letters.as_str())?, true)),
            Some('+') => Some(Other::Then(self.inner(letters.as_str())?)),
            Some('?') => None,
            Some(_) => return Ok(Piece::Text(format!("${{{inner}}}"), quoted)),
        };
        let name = match array {
            Some(_) => format!("{name}[@]"),
            None => name.to_owned(),
        };
        Ok(Piece::Variable {
            name,
            other,
            quoted,
        })
    }
}

fn push(pieces: &mut Vec<Piece>, text: &mut String) {
    if !text.is_empty() {
        pieces.push(Piece::Text(std::mem::take(text), false));
    }
}
