//! The published runs that the tool carries: one JSON object per line, nulls left out.

use super::Run;
use crate::error::SpecError;

const EMBEDDED: &str = include_str!("../../presets/runs/published.jsonl");

/// Reads the embedded runs.
///
/// # Errors
/// Never for the embedded file; a test reads it.
pub fn embedded() -> Result<Vec<Run>, SpecError> {
    EMBEDDED
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| crate::text::json(line, &format!("published.jsonl:{}", number + 1)))
        .collect()
}

/// Writes runs in the compact form.
#[must_use]
pub fn to_compact(runs: &[Run]) -> String {
    let mut text = String::new();
    for run in runs {
        if let Ok(mut value) = serde_json::to_value(run) {
            drop_nulls(&mut value);
            text.push_str(&value.to_string());
            text.push('\n');
        }
    }
    text
}

fn drop_nulls(value: &mut serde_json::Value) {
    if let serde_json::Value::Object(map) = value {
        map.retain(|_, v| !v.is_null());
        map.values_mut().for_each(drop_nulls);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_runs_read_back_as_written() {
        let runs = embedded().expect("embedded runs are well-formed");
        assert!(runs.len() > 300);
        assert_eq!(to_compact(&runs), EMBEDDED);
    }
}
