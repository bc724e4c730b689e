//! Errors of planning, as Python exceptions.

use accuracy::logged_run::LoggedRunError;
use answers::AnswerError;
use catalog::Mistake;
use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

/// Everything that becomes a `ValueError`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error(transparent)]
    Answer(#[from] AnswerError),
    #[error(transparent)]
    Spec(#[from] catalog::SpecError),
    #[error(transparent)]
    Mistake(#[from] Mistake),
    #[error(transparent)]
    Strategy(#[from] plans::StrategyError),
    #[error(transparent)]
    Planner(#[from] planner::PlannerError),
    #[error(transparent)]
    Cost(#[from] costmodel::CostError),
    #[error(transparent)]
    Export(#[from] interop::export::ExportError),
    #[error(transparent)]
    Log(#[from] LoggedRunError),
    #[error("{0}")]
    Usage(String),
}

/// Flags of the command line that are arguments of another name in Python. Those in `_` end with the name of a dimension.
const ARGUMENTS: [(&str, &str); 6] = [
    ("seq", "seq_len"),
    ("model", "model_or_config"),
    ("fix", ""),
    ("min", "min_"),
    ("max", "max_"),
    ("forbid", "forbid="),
];

/// Flags of the command line that are arguments of the same name in Python, but for their dashes.
const ALIKE: [&str; 16] = [
    "cluster",
    "gpus",
    "runtime",
    "global-batch",
    "lengths",
    "packing",
    "precision",
    "headroom",
    "objective",
    "strategy",
    "why-not",
    "warmup",
    "launcher",
    "tokenizer",
    "data",
    "hf-id",
];

/// A message with the names of Python's arguments in place of the command line's flags. Other words in dashes, as the options
/// of training systems, stay.
pub(crate) fn in_python(message: &str) -> String {
    let message = message
        .replace("replace it with --force", "delete it first")
        .replace("replace the link with --force", "delete the link first");
    let mut parts = message.split("--");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        let (flag, rest) = part.split_at(end.unwrap_or(part.len()));
        let other = ARGUMENTS.iter().find(|(name, _)| *name == flag);
        match other {
            // What follows is the dimension itself.
            Some((_, argument)) if argument.is_empty() || argument.ends_with(['_', '=']) => {
                text.push_str(argument);
                text.push_str(rest.trim_start());
            }
            Some((_, argument)) => {
                text.push_str(argument);
                text.push_str(rest);
            }
            None if ALIKE.contains(&flag) => {
                text.push_str(&flag.replace('-', "_"));
                text.push_str(rest);
            }
            None => {
                text.push_str("--");
                text.push_str(part);
            }
        }
    }
    text
}

impl From<PlanError> for PyErr {
    fn from(error: PlanError) -> Self {
        // One line, as all of these errors are.
        let lines: Vec<String> = error
            .to_string()
            .lines()
            .map(|l| l.trim().to_owned())
            .collect();
        PyValueError::new_err(in_python(&lines.join(" ")))
    }
}
