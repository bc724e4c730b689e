//! Parser of TOML that records line numbers.

use std::ops::Range;

use toml_edit::{Document, Item, Table, TableLike};

use super::error::SyntaxError;
use super::node::{Node, Value};

/// Reads a TOML document.
///
/// # Errors
/// When the text is not TOML, with the line.
pub fn parse(text: &str, path: &str) -> Result<Node, SyntaxError> {
    let lines = Lines::of(text);
    let document = Document::parse(text.to_owned()).map_err(|error| {
        let line = lines.at(error.span());
        let message = error.message().lines().next().unwrap_or("malformed");
        SyntaxError::new(path, line, message)
    })?;
    let root: &Table = document.as_table();
    Ok(table(root, &lines))
}

/// Offsets of the line ends of a text.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    /// The line on which a span begins, from 1; 0 without a span.
    fn at(&self, span: Option<Range<usize>>) -> usize {
        span.map_or(0, |span| {
            self.0.partition_point(|&end| end < span.start) + 1
        })
    }
}

fn table(table: &dyn TableLike, lines: &Lines) -> Node {
    let entries = table.iter().map(|(key, item)| {
        let at = table.key(key).and_then(toml_edit::Key::span);
        let mut node = node(item, lines);
        if at.is_some() {
            node.line = lines.at(at);
        }
        (key.to_owned(), node)
    });
    Node {
        line: 1,
        value: Value::Table(entries.collect()),
    }
}

fn node(item: &Item, lines: &Lines) -> Node {
    let line = lines.at(item.span());
    if let Some(inner) = item.as_table_like() {
        let value = table(inner, lines).value;
        return Node { line, value };
    }
    let value = match item {
        Item::ArrayOfTables(tables) => {
            Value::List(tables.iter().map(|t| table(t, lines)).collect())
        }
        Item::Value(value) => scalar(value, lines),
        Item::None | Item::Table(_) => Value::Null,
    };
    Node { line, value }
}

fn scalar(value: &toml_edit::Value, lines: &Lines) -> Value {
    match value {
        toml_edit::Value::String(s) => Value::Str(s.value().clone()),
        toml_edit::Value::Integer(i) => Value::Int(*i.value()),
        toml_edit::Value::Float(f) => Value::Float(*f.value()),
        toml_edit::Value::Boolean(b) => Value::Bool(*b.value()),
        toml_edit::Value::Datetime(d) => Value::Str(d.value().to_string()),
        toml_edit::Value::Array(items) => Value::List(
            items
                .iter()
                .map(|item| Node {
                    line: lines.at(item.span()),
                    value: scalar(item, lines),
                })
                .collect(),
        ),
        toml_edit::Value::InlineTable(inner) => table(inner, lines).value,
    }
}
