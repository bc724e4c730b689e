//! Parser of Python configuration files: attribute assignments of literals, and constructors with keyword arguments.
//! Nothing is executed; other statements are skipped, and expressions that are not literals are kept as text.

use std::iter::Peekable;
use std::str::Chars;

use super::error::SyntaxError;
use super::functions;
use super::node::{Node, Value};

pub use super::functions::only_function;

/// An attribute assignment such as `config.training.seq_len = 8192`.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// Dotted path, the variable first.
    pub path: String,
    /// The value assigned.
    pub node: Node,
}

/// Deepest nesting that is read.
const MAX_DEPTH: usize = 64;

/// The path of a statement that is a call alone; no assignment can have it.
pub const CALL: &str = "()";

/// Reads assignments, `return` statements (path `return`) and calls ([`CALL`]), in order of execution if
/// [`only_function`] chose a function, else in file order.
///
/// # Errors
/// An unclosed string or bracket, a missing value or too deep nesting, with its line.
pub fn parse(text: &str, path: &str) -> Result<Vec<Assignment>, SyntaxError> {
    let tokens = tokens(text, path)?;
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let end = statement_end(&tokens, at);
        if let Some(assignment) = statement(&tokens[at..end], path)? {
            found.push(assignment);
        }
        at = end + 1;
    }
    let ranks = functions::ranks(text);
    found.sort_by_key(|assignment| ranks.get(assignment.node.line).copied());
    Ok(found)
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    Number(String),
    Text(String),
    Symbol(char),
    Newline,
}

type Placed = (Token, usize);

fn statement_end(tokens: &[Placed], from: usize) -> usize {
    let offset = tokens[from..]
        .iter()
        .position(|(t, _)| *t == Token::Newline);
    offset.map_or(tokens.len(), |n| from + n)
}

fn statement(tokens: &[Placed], file: &str) -> Result<Option<Assignment>, SyntaxError> {
    if let [(Token::Name(word), _), rest @ ..] = tokens
        && word == "return"
        && !rest.is_empty()
    {
        let node = Parser::whole(rest, file)?;
        let path = "return".to_owned();
        return Ok(Some(Assignment { path, node }));
    }
    let Some((path, mut used)) = dotted(tokens) else {
        return Ok(None);
    };
    if matches!(tokens.get(used), Some((Token::Symbol('('), _))) {
        // Calls are of interest only as far as they are read: others may have any arguments.
        let call = Parser::whole(tokens, file).ok();
        let call = call.filter(|node| matches!(node.value, Value::Call(..)));
        let path = CALL.to_owned();
        return Ok(call.map(|node| Assignment { path, node }));
    }
    // `NAME: int = 1` declares a type.
    if matches!(tokens.get(used), Some((Token::Symbol(':'), _))) {
        let equals = |(token, _): &Placed| *token == Token::Symbol('=');
        used += tokens[used..].iter().position(equals).unwrap_or(0);
    }
    let equals = matches!(tokens.get(used), Some((Token::Symbol('='), _)));
    let comparison = matches!(tokens.get(used + 1), Some((Token::Symbol('='), _)));
    if !equals || comparison || used + 1 >= tokens.len() {
        return Ok(None);
    }
    let line = tokens[0].1;
    let mut node = Parser::whole(&tokens[used + 1..], file)?;
    node.line = line;
    Ok(Some(Assignment { path, node }))
}

fn dotted(tokens: &[Placed]) -> Option<(String, usize)> {
    let Some((Token::Name(first), _)) = tokens.first() else {
        return None;
    };
    let mut path = first.clone();
    let mut at = 1;
    while let (Some((Token::Symbol('.'), _)), Some((Token::Name(name), _))) =
        (tokens.get(at), tokens.get(at + 1))
    {
        path.push('.');
        path.push_str(name);
        at += 2;
    }
    Some((path, at))
}

struct Parser<'a> {
    tokens: &'a [Placed],
    at: usize,
    file: &'a str,
}

impl<'a> Parser<'a> {
    /// Tokens as one value: an expression if they are more than a literal.
    fn whole(tokens: &'a [Placed], file: &'a str) -> Result<Node, SyntaxError> {
        let at = 0;
        let mut parser = Self { tokens, at, file };
        let line = parser.line();
        let node = parser.value(0)?;
        if parser.at == tokens.len() {
            return Ok(node);
        }
        let value = Value::Expression(shown(tokens));
        Ok(Node { line, value })
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(t, _)| t)
    }

    fn line(&self) -> usize {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(0, |(_, line)| *line)
    }

    fn value(&mut self, depth: usize) -> Result<Node, SyntaxError> {
        let line = self.line();
        if depth > MAX_DEPTH {
            return Err(SyntaxError::new(self.file, line, "nested too deeply"));
        }
        let value = match self.peek().cloned() {
            Some(Token::Text(text)) => {
                self.at += 1;
                let mut text = text;
                while let Some(Token::Text(more)) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                Value::Str(text)
            }
            Some(Token::Number(text)) => {
                self.at += 1;
                super::yaml::number(&text).unwrap_or(Value::Expression(text))
            }
            Some(Token::Symbol('-')) => {
                self.at += 1;
                match self.value(depth + 1)?.value {
                    Value::Int(i) => Value::Int(-i),
                    Value::Float(f) => Value::Float(-f),
                    other => Value::Expression(format!("-{}", other.shown())),
                }
            }
            Some(Token::Symbol(open @ ('[' | '('))) => {
                self.at += 1;
                self.bracketed(open, depth)?
            }
            Some(Token::Symbol('{')) => {
                self.at += 1;
                Value::Table(self.pairs(depth)?)
            }
            Some(Token::Name(_)) => self.name(depth)?,
            Some(Token::Symbol(c)) => {
                self.at += 1;
                Value::Expression(c.to_string())
            }
            Some(Token::Newline) | None => {
                return Err(SyntaxError::new(
                    self.file,
                    line,
                    "a value is expected here",
                ));
            }
        };
        Ok(Node { line, value })
    }

    /// Reads a list, tuple or parenthesized value after its opening bracket.
    fn bracketed(&mut self, open: char, depth: usize) -> Result<Value, SyntaxError> {
        let close = if open == '[' { ']' } else { ')' };
        let mut items = self.listed(close, |this, _| this.item(depth).map(Some))?;
        let comma = self.at >= 2 && self.tokens[self.at - 2].0 == Token::Symbol(',');
        Ok(match items.pop() {
            // `(1)` is a number, `(1,)` a tuple.
            Some(one) if open == '(' && items.is_empty() && !comma => one.value,
            Some(last) => {
                items.push(last);
                Value::List(items)
            }
            None => Value::List(items),
        })
    }

    fn name(&mut self, depth: usize) -> Result<Value, SyntaxError> {
        let Some((path, used)) = dotted(&self.tokens[self.at..]) else {
            return Ok(Value::Null);
        };
        self.at += used;
        if self.peek() == Some(&Token::Symbol('(')) {
            self.at += 1;
            return Ok(Value::Call(path, self.arguments(depth)?));
        }
        Ok(match path.as_str() {
            "None" => Value::Null,
            "True" => Value::Bool(true),
            "False" => Value::Bool(false),
            _ => Value::Expression(path),
        })
    }

    /// Reads on to a comma or closing bracket: a product such as `8 * 2048`, or an expression.
    fn rest(&mut self, node: Node, from: usize) -> Node {
        let mut depth = 0usize;
        let start = self.at;
        while let Some(token) = self.peek() {
            match token {
                Token::Symbol(',' | ')' | ']' | '}') if depth == 0 => break,
                Token::Symbol('(' | '[' | '{') => depth += 1,
                Token::Symbol(')' | ']' | '}') => depth -= 1,
                _ => {}
            }
            self.at += 1;
        }
        if self.at == start {
            return node;
        }
        let tokens = &self.tokens[from..self.at];
        let value = product(tokens).map_or_else(|| Value::Expression(shown(tokens)), Value::Int);
        Node {
            line: node.line,
            value,
        }
    }

    /// Reads what stands between commas up to a bracket; `one` is given how many were read before.
    fn listed<T>(
        &mut self,
        close: char,
        mut one: impl FnMut(&mut Self, usize) -> Result<Option<T>, SyntaxError>,
    ) -> Result<Vec<T>, SyntaxError> {
        let mut all = Vec::new();
        let line = self.line();
        loop {
            match self.peek() {
                None => {
                    let message = format!("`{close}` is missing");
                    return Err(SyntaxError::new(self.file, line, message));
                }
                Some(Token::Symbol(c)) if *c == close => {
                    self.at += 1;
                    return Ok(all);
                }
                Some(Token::Symbol(',')) => self.at += 1,
                Some(_) => all.extend(one(self, all.len())?),
            }
        }
    }

    /// Reads a value inside brackets, up to the next comma.
    fn item(&mut self, depth: usize) -> Result<Node, SyntaxError> {
        let from = self.at;
        let node = self.value(depth + 1)?;
        Ok(self.rest(node, from))
    }

    fn pairs(&mut self, depth: usize) -> Result<Vec<(String, Node)>, SyntaxError> {
        self.listed('}', |this, _| {
            let key = this.value(depth + 1)?;
            if this.peek() != Some(&Token::Symbol(':')) {
                // An element of a set, or what `**` unpacks: it has no key to check.
                let from = this.at;
                this.rest(key, from);
                return Ok(None);
            }
            this.at += 1;
            let mut node = this.item(depth)?;
            node.line = key.line;
            Ok(Some((key.value.plain(), node)))
        })
    }

    fn arguments(&mut self, depth: usize) -> Result<Vec<(String, Node)>, SyntaxError> {
        self.listed(')', |this, index| {
            match (this.peek().cloned(), this.tokens.get(this.at + 1)) {
                (Some(Token::Symbol('*')), _) => {
                    this.at += 1;
                    Ok(None)
                }
                (Some(Token::Name(key)), Some((Token::Symbol('='), _))) => {
                    let line = this.line();
                    this.at += 2;
                    let mut node = this.item(depth)?;
                    node.line = line;
                    Ok(Some((key, node)))
                }
                // A positional argument has no name to check; its index stands for one.
                _ => Ok(Some((format!("#{index}"), this.item(depth)?))),
            }
        })
    }
}

fn shown(tokens: &[Placed]) -> String {
    let words: Vec<String> = tokens
        .iter()
        .map(|(token, _)| match token {
            Token::Name(t) | Token::Number(t) => t.clone(),
            Token::Text(t) => format!("\"{t}\""),
            Token::Symbol(c) => c.to_string(),
            Token::Newline => String::new(),
        })
        .collect();
    words.join(" ")
}

/// A product of integer literals, such as `8 * 2048`.
fn product(tokens: &[Placed]) -> Option<i64> {
    let mut all = 1i64;
    for (i, (token, _)) in tokens.iter().enumerate() {
        match (i % 2, token) {
            (0, Token::Number(n)) => all = all.checked_mul(n.replace('_', "").parse().ok()?)?,
            (1, Token::Symbol('*')) => {}
            _ => return None,
        }
    }
    (tokens.len() % 2 == 1).then_some(all)
}

fn tokens(text: &str, path: &str) -> Result<Vec<Placed>, SyntaxError> {
    let mut found = Vec::new();
    let mut chars = text.chars().peekable();
    let (mut line, mut depth) = (1, 0i64);
    while let Some(c) = chars.next() {
        match c {
            '\n' => {
                if depth <= 0 {
                    found.push((Token::Newline, line));
                }
                line += 1;
            }
            ';' => found.push((Token::Newline, line)),
            '\\' => {
                if chars.next_if_eq(&'\n').is_some() {
                    line += 1;
                }
            }
            '#' => while chars.next_if(|&c| c != '\n').is_some() {},
            '"' | '\'' => {
                let start = line;
                let string = string(c, false, &mut chars, &mut line)
                    .ok_or_else(|| SyntaxError::new(path, start, "a string is not closed"))?;
                found.push((Token::Text(string), start));
            }
            c if c.is_whitespace() => {}
            c if c.is_alphabetic() || c == '_' => {
                let mut name = String::from(c);
                while let Some(c) = chars.next_if(|&c| c.is_alphanumeric() || c == '_') {
                    name.push(c);
                }
                let prefix = name.len() <= 2 && name.chars().all(|c| "rRbBfFuU".contains(c));
                if let Some(quote) = chars.next_if(|&c| prefix && (c == '"' || c == '\'')) {
                    let (start, raw) = (line, name.contains(['r', 'R']));
                    let string = string(quote, raw, &mut chars, &mut line)
                        .ok_or_else(|| SyntaxError::new(path, start, "a string is not closed"))?;
                    found.push((Token::Text(string), start));
                } else {
                    found.push((Token::Name(name), line));
                }
            }
            c if c.is_ascii_digit() => {
                found.push((Token::Number(number(c, &mut chars)), line));
            }
            c => {
                depth += i64::from("([{".contains(c)) - i64::from(")]}".contains(c));
                found.push((Token::Symbol(c), line));
            }
        }
    }
    Ok(found)
}

/// Reads a number that begins with the digit `first`.
fn number(first: char, chars: &mut Peekable<Chars<'_>>) -> String {
    let mut number = String::from(first);
    while let Some(c) = chars.next_if(|&c| c.is_ascii_alphanumeric() || c == '.' || c == '_') {
        number.push(c);
        if matches!(c, 'e' | 'E') {
            number.extend(chars.next_if(|&c| c == '-' || c == '+'));
        }
    }
    number
}

/// Reads the rest of a string after its first quote, triple-quoted strings included.
fn string(
    quote: char,
    raw: bool,
    chars: &mut Peekable<Chars<'_>>,
    line: &mut usize,
) -> Option<String> {
    let mut triple = false;
    if chars.peek() == Some(&quote) {
        chars.next();
        if chars.next_if_eq(&quote).is_none() {
            return Some(String::new());
        }
        triple = true;
    }
    let mut text = String::new();
    loop {
        let c = chars.next()?;
        if c == '\n' {
            if !triple {
                return None;
            }
            *line += 1;
        }
        match c {
            '\\' if raw => text.extend(['\\', chars.next()?]),
            '\\' => match chars.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'x' => text.push(code_point(chars, 2)?),
                'u' => text.push(code_point(chars, 4)?),
                'U' => text.push(code_point(chars, 8)?),
                '\n' => *line += 1,
                c => text.push(c),
            },
            c if c == quote && !triple => return Some(text),
            c if c == quote => {
                text.push(c);
                if text.ends_with(&String::from(quote).repeat(3)) {
                    text.truncate(text.len() - 3);
                    return Some(text);
                }
            }
            c => text.push(c),
        }
    }
}

/// The character with the code point in the next `digits` hexadecimal digits.
fn code_point(chars: &mut Peekable<Chars<'_>>, digits: usize) -> Option<char> {
    let mut code = 0;
    for _ in 0..digits {
        code = code * 16 + chars.next()?.to_digit(16)?;
    }
    char::from_u32(code)
}
