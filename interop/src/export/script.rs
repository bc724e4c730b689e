//! Shared by targets whose model is defined in the user's training script: the script's path and its inputs.

use super::inputs::{Input, Inputs};
use super::refusal::Limits;
use crate::config::escape::shell;

/// Environment variable that names the training script.
pub(crate) const TRAIN_SCRIPT: &str = "TRAIN_SCRIPT";

/// Shell lines that stop if no training script is named, and export the given inputs to it.
pub(crate) fn setup(inputs: &Inputs<'_>) -> Vec<String> {
    let mut lines = vec![format!(
        ": \"${{{TRAIN_SCRIPT}:?set {TRAIN_SCRIPT} to your training script}}\""
    )];
    for (variable, input) in [
        ("MODEL", Input::HfId),
        ("TOKENIZER", Input::Tokenizer),
        ("DATA", Input::Data),
    ] {
        if let Some(given) = input.given(inputs) {
            lines.push(format!("export {variable}={}", shell(given)));
        }
    }
    lines
}

/// Lists the training script as an input still to be filled in.
pub(crate) fn inputs(limits: &mut Limits) {
    limits.variable(
        TRAIN_SCRIPT,
        "your training script, which makes the model that the plan is for; it finds what --hf-id, --tokenizer and \
         --data gave in MODEL, TOKENIZER and DATA",
    );
}
