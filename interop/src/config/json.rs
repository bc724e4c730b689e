//! Parser of JSON that records line numbers.

use super::error::SyntaxError;
use super::node::Node;
use super::yaml;

/// Reads a JSON document.
///
/// # Errors
/// When the text is not JSON, with the line.
pub fn parse(text: &str, path: &str) -> Result<Node, SyntaxError> {
    // The strict JSON parser validates; JSON is also YAML, whose parser then gives the lines.
    if let Err(error) = serde_json::from_str::<serde_json::Value>(text) {
        let line = error.line();
        let message = error.to_string();
        let message = message.split(" at line").next().unwrap_or("malformed");
        return Err(SyntaxError::new(path, line, message));
    }
    yaml::parse(text, path)
}

/// Reads a JSON document in which every key must be unique, as DeepSpeed does (`dict_raise_error_on_duplicate_keys` in
/// runtime/config_utils.py). Other readers take the last of equal keys.
///
/// # Errors
/// When the text is not JSON, or has a key twice, with the line.
pub fn parse_unique(text: &str, path: &str) -> Result<Node, SyntaxError> {
    let root = parse(text, path)?;
    match repeated(&root) {
        None => Ok(root),
        Some((key, line)) => {
            let message = format!("`{key}` is there twice; expected each key once");
            Err(SyntaxError::new(path, line, &message))
        }
    }
}

/// The first key that is in its table already, with its line.
fn repeated(node: &Node) -> Option<(&str, usize)> {
    let below = node.list().unwrap_or_default().iter().find_map(repeated);
    let mut seen = std::collections::BTreeSet::new();
    let mut own = node.entries().iter();
    below.or_else(|| {
        own.find_map(|(key, value)| match seen.insert(key) {
            true => repeated(value),
            false => Some((key.as_str(), value.line)),
        })
    })
}
