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
