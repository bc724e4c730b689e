//! What targets share whose model is the training script's own: the script, and what is handed to it.

use super::inputs::{Input, Inputs};
use super::refusal::Limits;
use crate::config::escape::shell;

/// Variable of the environment that names the training script.
pub(crate) const TRAIN_SCRIPT: &str = "TRAIN_SCRIPT";

/// The shell lines that stop without a training script, and hand it what was given.
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

/// What is to be filled in.
pub(crate) fn inputs(limits: &mut Limits) {
    limits.variable(
        TRAIN_SCRIPT,
        "your training script, which makes the model that the plan is for; it finds what --hf-id, --tokenizer and \
         --data gave in MODEL, TOKENIZER and DATA",
    );
}
