//! Weights that examples train to in exact mode.

use std::fs;

use crate::common::{code, examples, json, run, stderr};
use crate::{compare, lines};

/// The shipped plans, in order.
pub(crate) fn plans() -> Vec<String> {
    let entries = fs::read_dir(examples()).expect("examples");
    let mut plans: Vec<String> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
        .map(|path| path.display().to_string())
        .collect();
    plans.sort();
    assert_eq!(plans.len(), 13);
    plans
}

/// The last part of a path.
pub(crate) fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[test]
fn weights_of_examples() {
    let text = lines(&plans(), |plan| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        // The large one takes seconds a step.
        let steps = if plan.contains("10m") { "1" } else { "4" };
        let args = [
            "run",
            plan,
            "--steps",
            steps,
            "--numerics",
            "exact",
            "--json",
            "--quiet",
        ];
        let output = run(folder.path(), &args);
        assert_eq!(code(&output), 0, "{plan}: {}", stderr(&output));
        let answer = json(&output);
        let bits: Vec<&str> = answer["losses"]
            .as_array()
            .expect("losses")
            .iter()
            .map(|loss| loss["bits"].as_str().unwrap_or(""))
            .collect();
        let weights = answer["weights_sha256"].as_str().expect("a digest");
        format!(
            "{} {steps} steps: {weights}, losses {}",
            name(plan),
            bits.join(" ")
        )
    });
    compare("weights.txt", &text);
}
