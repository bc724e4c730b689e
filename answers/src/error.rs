//! Why a question has no answer.

use catalog::{Mistake, SpecError};
use planner::PlannerError;
use plans::StrategyError;

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// A name, file or field of the input is invalid.
    #[error(transparent)]
    Spec(Box<SpecError>),
    /// A strategy is not legal.
    #[error(transparent)]
    Strategy(Box<StrategyError>),
    /// A search cannot run.
    #[error(transparent)]
    Planner(Box<PlannerError>),
    /// A scenario cannot be priced.
    #[error(transparent)]
    Cost(#[from] costmodel::CostError),
    /// A value is wrong.
    #[error("{0}")]
    Input(Box<Mistake>),
}

impl From<SpecError> for AnswerError {
    fn from(error: SpecError) -> Self {
        Self::Spec(Box::new(error))
    }
}

impl From<StrategyError> for AnswerError {
    fn from(error: StrategyError) -> Self {
        Self::Strategy(Box::new(error))
    }
}

impl From<PlannerError> for AnswerError {
    fn from(error: PlannerError) -> Self {
        Self::Planner(Box::new(error))
    }
}

impl From<Mistake> for AnswerError {
    fn from(mistake: Mistake) -> Self {
        Self::Input(Box::new(mistake))
    }
}

impl AnswerError {
    /// The error split into what is wrong, where, what was expected and an example, as far as these are known.
    #[must_use]
    pub fn mistake(&self) -> Mistake {
        match self {
            Self::Spec(error) => error.mistake(),
            Self::Strategy(error) => error.mistake(),
            Self::Planner(error) => match error.as_ref() {
                PlannerError::Constraint(mistake) => mistake.clone(),
                other => Mistake::new(other.to_string()),
            },
            Self::Cost(error) => Mistake::new(error.to_string()),
            Self::Input(mistake) => mistake.as_ref().clone(),
        }
    }
}
