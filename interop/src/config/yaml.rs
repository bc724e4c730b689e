//! Parser of YAML that records line numbers.

use granit_parser::{Event, Parser, ScalarStyle};

use super::error::SyntaxError;
use super::node::{Node, Value};

/// Deepest nesting that is read.
const MAX_DEPTH: usize = 64;

/// Reads the first document of a YAML file.
///
/// # Errors
/// When the text is not YAML, or uses aliases, which no example of these systems does.
pub fn parse(text: &str, path: &str) -> Result<Node, SyntaxError> {
    let mut reader = Reader {
        events: Parser::new_from_str(text),
        path,
    };
    loop {
        let (event, line) = reader.next()?;
        match event {
            Event::StreamEnd => return Ok(Node::table()),
            Event::StreamStart | Event::DocumentStart(..) => {}
            event => return reader.node(event, line, 0),
        }
    }
}

struct Reader<'a, P> {
    events: P,
    path: &'a str,
}

impl<'a, P> Reader<'a, P>
where
    P: Iterator<Item = Result<(Event<'a>, granit_parser::Span), granit_parser::ScanError>>,
{
    /// The next event that carries data, with its line.
    fn next(&mut self) -> Result<(Event<'a>, usize), SyntaxError> {
        loop {
            match self.events.next() {
                None => return Ok((Event::StreamEnd, 0)),
                Some(Err(error)) => {
                    let line = error.marker().line();
                    return Err(SyntaxError::new(self.path, line, error.info()));
                }
                Some(Ok((Event::Comment(..), _))) => {}
                Some(Ok((event, span))) => return Ok((event, span.start.line())),
            }
        }
    }

    fn node(&mut self, event: Event<'a>, line: usize, depth: usize) -> Result<Node, SyntaxError> {
        let wrong = |message: &str| Err(SyntaxError::new(self.path, line, message));
        if depth > MAX_DEPTH {
            return wrong("nested too deeply");
        }
        let value = match event {
            Event::Scalar(text, style, ..) => scalar(&text, style),
            Event::SequenceStart(..) => {
                let mut items = Vec::new();
                loop {
                    let (event, line) = self.next()?;
                    if matches!(event, Event::SequenceEnd | Event::StreamEnd) {
                        break;
                    }
                    items.push(self.node(event, line, depth + 1)?);
                }
                Value::List(items)
            }
            Event::MappingStart(..) => {
                let mut entries = Vec::new();
                loop {
                    let (event, line) = self.next()?;
                    let key = match event {
                        Event::MappingEnd | Event::StreamEnd => break,
                        Event::Scalar(text, ..) => text.into_owned(),
                        _ => return Err(SyntaxError::new(self.path, line, "a key must be text")),
                    };
                    let (event, _) = self.next()?;
                    let mut node = self.node(event, line, depth + 1)?;
                    node.line = line;
                    entries.push((key, node));
                }
                Value::Table(entries)
            }
            Event::Alias(_) => return wrong("anchors and aliases are not read here"),
            _ => return wrong("unexpected end"),
        };
        Ok(Node { line, value })
    }
}

/// A plain scalar by YAML's core schema, with the words that PyYAML also reads as booleans; quoted scalars are strings.
fn scalar(text: &str, style: ScalarStyle) -> Value {
    if style != ScalarStyle::Plain {
        return Value::Str(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "on" => return Value::Bool(true),
        "false" | "False" | "FALSE" | "no" | "off" => return Value::Bool(false),
        _ => {}
    }
    number(text).unwrap_or_else(|| Value::Str(text.to_owned()))
}

/// The finite number that a text spells, if any.
pub(crate) fn number(text: &str) -> Option<Value> {
    let digits = text.trim_start_matches(['-', '+']);
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let text = text.replace('_', "");
    if let Ok(int) = text.parse::<i64>() {
        return Some(Value::Int(int));
    }
    let float = text.parse::<f64>().ok()?;
    float.is_finite().then_some(Value::Float(float))
}
