//! Launch scripts and argument files as a shell would see them, as far as launch scripts go:
//! comments, quotes, continuation lines, assignments, arrays, `$VAR`, `${VAR:-default}`,
//! `"${ARRAY[@]}"`, `source FILE`. Nothing is run; what would have to be is left as text.

use std::collections::BTreeMap;

use super::SyntaxError;

/// A word with the line it began on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// Text, expanded.
    pub text: String,
    /// Line, from 1.
    pub line: usize,
}

/// A script's words, command by command, and the variables it sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Words of each command.
    pub commands: Vec<Vec<Word>>,
    /// Variables and arrays; an ordinary variable has one word.
    pub variables: BTreeMap<String, Vec<Word>>,
}

/// Expansions deeper than this are a loop.
const MAX_WORDS: usize = 1 << 20;

#[derive(Clone, Debug)]
enum Token {
    Word(Raw),
    Open,
    Close,
    End,
}

/// A word as written: pieces, each expanded or literal.
#[derive(Clone, Debug)]
struct Raw {
    pieces: Vec<Piece>,
    line: usize,
}

#[derive(Clone, Debug)]
enum Piece {
    /// Literal text; the flag says whether it was quoted.
    Text(String, bool),
    /// `$name`, `${name:-default}`, `${name[@]}`; quoted or not.
    Variable {
        name: String,
        default: Option<String>,
        quoted: bool,
    },
}

/// Reads a script. `include` gives the text of a sourced file by its base name, if there is one.
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
                        joined(&rest, script)
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
                    command.extend(expand(raw, script));
                }
            }
        }
        if script.commands.len() + command.len() > MAX_WORDS {
            return Err(SyntaxError::new(path, 0, "too many words"));
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

/// `NAME=…` or `NAME+=…` at the start of a command, also after `export`.
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

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn elements(
    tokens: &[Token],
    mut index: usize,
    path: &str,
    line: usize,
    script: &Script,
) -> Result<(Vec<Word>, usize), SyntaxError> {
    let mut words = Vec::new();
    loop {
        match tokens.get(index) {
            None => return Err(SyntaxError::new(path, line, "`(` is not closed")),
            Some(Token::Close) => return Ok((words, index + 1)),
            Some(Token::Word(raw)) => words.extend(expand(raw, script)),
            Some(Token::End | Token::Open) => {}
        }
        index += 1;
    }
}

/// Expansion without splitting, as in an assignment.
fn joined(raw: &Raw, script: &Script) -> Vec<Word> {
    let mut text = String::new();
    for piece in &raw.pieces {
        match piece {
            Piece::Text(t, _) => text.push_str(t),
            Piece::Variable { name, default, .. } => {
                text.push_str(&value(name, default.as_deref(), script).join(" "));
            }
        }
    }
    vec![Word {
        text,
        line: raw.line,
    }]
}

/// Expansion with the splitting of unquoted variables; `"${A[@]}"` keeps its words. Words of an
/// array keep the line where they were written.
fn expand(raw: &Raw, script: &Script) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
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
            ),
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
            if i > 0 {
                words.extend(current.take());
            }
            let word = current.get_or_insert_with(|| empty(part.line));
            word.text.push_str(&part.text);
        }
    }
    words.extend(current);
    words
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
            // What the environment would give is not known; the name stays visible.
            None if plain == "@" => Vec::new(),
            None => vec![format!("${plain}")],
        },
    }
}

struct Lexer<'a> {
    chars: std::iter::Peekable<std::str::Chars<'a>>,
    path: &'a str,
    line: usize,
}

impl<'a> Lexer<'a> {
    fn new(text: &'a str, path: &'a str) -> Self {
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

    fn tokens(mut self) -> Result<Vec<Token>, SyntaxError> {
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

    /// The rest of `${…}`, with what is nested in it.
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

    fn variable(&mut self, quoted: bool) -> Result<Piece, SyntaxError> {
        let line = self.line;
        match self.chars.peek() {
            Some('{') => {
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
            Some('(') => {
                let mut depth = 0;
                let mut text = String::from("$");
                loop {
                    let Some(c) = self.next() else {
                        return Err(SyntaxError::new(self.path, line, "`$(` is not closed"));
                    };
                    text.push(c);
                    depth += i32::from(c == '(') - i32::from(c == ')');
                    if depth == 0 && text.starts_with("$((") {
                        let (name, default) = (text, None);
                        return Ok(Piece::Variable {
                            name,
                            default,
                            quoted,
                        });
                    }
                    if depth == 0 {
                        return Ok(Piece::Text(text, quoted));
                    }
                }
            }
            Some(&c) if c == '@' || c == '*' => {
                self.next();
                let name = "@[@]".to_owned();
                Ok(Piece::Variable {
                    name,
                    default: None,
                    quoted,
                })
            }
            Some(&c) if is_name(c) => {
                let mut name = String::new();
                while let Some(&c) = self.chars.peek() {
                    if !is_name(c) {
                        break;
                    }
                    name.push(c);
                    self.next();
                }
                Ok(Piece::Variable {
                    name,
                    default: None,
                    quoted,
                })
            }
            _ => Ok(Piece::Text("$".to_owned(), quoted)),
        }
    }
}

fn push(pieces: &mut Vec<Piece>, text: &mut String) {
    if !text.is_empty() {
        pieces.push(Piece::Text(std::mem::take(text), false));
    }
}

/// `$((A*B))` of whole numbers and variables that hold them; anything else stays text.
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
