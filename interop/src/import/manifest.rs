//! Manifests of Kubernetes, which start a training and hold the file with its settings as text.

use crate::config::SyntaxError;

/// Refuses a manifest, and names the file with the settings.
pub(super) fn refuse(text: &str, path: &str) -> Result<(), SyntaxError> {
    let is_yaml = path.ends_with(".yaml") || path.ends_with(".yml");
    let begins = |key: &str| text.lines().any(|line| line.starts_with(key));
    if !is_yaml || !begins("apiVersion:") || !begins("kind:") {
        return Ok(());
    }
    let found = held(text);
    let line = found.map_or(0, |(line, _)| line);
    let message = match found {
        Some((_, name)) => format!(
            "a Kubernetes manifest starts the training; its settings are in `{name}`; give that file"
        ),
        None => {
            "a Kubernetes manifest starts the training; give the file with its settings".to_owned()
        }
    };
    Err(SyntaxError::new(path, line, message))
}

/// The first file that a manifest holds, with its line: a key with a suffix and a block of text, as in a `ConfigMap`.
fn held(text: &str) -> Option<(usize, &str)> {
    let is_name = |name: &&str| {
        let mut letters = name.chars();
        name.contains('.') && letters.all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    let mut lines = text.lines().enumerate();
    lines.find_map(|(at, line)| {
        let name = line.trim().strip_suffix(": |").filter(is_name)?;
        Some((at + 1, name))
    })
}
