//! A parallelism strategy: decisions that are legal for a model and a workload.

use std::fmt;
use std::ops::Deref;

use catalog::Workload;
use catalog::model::ModelConfig;

use crate::decisions::Decisions;
use crate::legality::{self, StrategyError};

/// A legal strategy for some model and number of devices. Fields are read through `Deref`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Strategy(Decisions);

impl Strategy {
    /// Makes a strategy of decisions, if they are legal.
    ///
    /// # Errors
    /// The first rule broken.
    pub fn new(
        decisions: Decisions,
        model: &ModelConfig,
        workload: &Workload,
    ) -> Result<Self, StrategyError> {
        legality::check(&decisions, model, workload)?;
        Ok(Self(decisions))
    }

    /// The decisions of the strategy.
    #[must_use]
    pub fn decisions(&self) -> &Decisions {
        &self.0
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Deref for Strategy {
    type Target = Decisions;
    fn deref(&self) -> &Decisions {
        &self.0
    }
}
