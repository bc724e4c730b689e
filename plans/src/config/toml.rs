//! TOML with line numbers.

use toml_edit::{Document, Item, Table, TableLike};

use super::{Node, SyntaxError, Value};

/// Reads a TOML document.
///
/// # Errors
/// With the line, when it is not TOML.
pub fn parse(text: &str, path: &str) -> Result<Node, SyntaxError> {
    let document = Document::parse(text.to_owned()).map_err(|error| {
        let line = error.span().map_or(0, |span| line(text, span.start));
        let message = error.message().lines().next().unwrap_or("malformed");
        SyntaxError::new(path, line, message)
    })?;
    let root: &Table = document.as_table();
    Ok(table(root, text))
}

fn line(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|&b| b == b'\n').count() + 1
}

fn table(table: &dyn TableLike, text: &str) -> Node {
    let entries = table.iter().map(|(key, item)| {
        let at = table.key(key).and_then(toml_edit::Key::span);
        let mut node = node(item, text);
        if let Some(span) = at {
            node.line = line(text, span.start);
        }
        (key.to_owned(), node)
    });
    Node {
        line: 1,
        value: Value::Table(entries.collect()),
    }
}

fn node(item: &Item, text: &str) -> Node {
    let line = item.span().map_or(0, |span| line(text, span.start));
    if let Some(inner) = item.as_table_like() {
        let value = table(inner, text).value;
        return Node { line, value };
    }
    let value = match item {
        Item::ArrayOfTables(tables) => Value::List(tables.iter().map(|t| table(t, text)).collect()),
        Item::Value(value) => scalar(value, text),
        Item::None | Item::Table(_) => Value::Null,
    };
    Node { line, value }
}

fn scalar(value: &toml_edit::Value, text: &str) -> Value {
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
                    line: item.span().map_or(0, |span| line(text, span.start)),
                    value: scalar(item, text),
                })
                .collect(),
        ),
        toml_edit::Value::InlineTable(inner) => table(inner, text).value,
    }
}
