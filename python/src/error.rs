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
    Answer(AnswerError),
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

impl From<AnswerError> for PlanError {
    fn from(error: AnswerError) -> Self {
        match error {
            AnswerError::Input(mistake) => Self::Mistake(at_argument(*mistake)),
            other => Self::Answer(other),
        }
    }
}

/// Moves a mistake from a flag of the command line to Python's argument of that name.
fn at_argument(mistake: Mistake) -> Mistake {
    let flag = mistake.place.as_deref().and_then(|p| p.strip_prefix("--"));
    match flag.map(|flag| flag.replace('-', "_")) {
        Some(argument) => mistake.at(argument),
        None => mistake,
    }
}

impl From<PlanError> for PyErr {
    fn from(error: PlanError) -> Self {
        // One line, as all of these errors are.
        let lines: Vec<String> = error
            .to_string()
            .lines()
            .map(|l| l.trim().to_owned())
            .collect();
        PyValueError::new_err(lines.join(" "))
    }
}
