//! A training log with its plan and the prediction for it.

use std::path::Path;

use interop::training_log::{self, Steady, StepSize, TrainingLog};
use plans::Prediction;

use crate::commands::plan::{self, Loaded};
use crate::error::CliError;

/// A log with its plan and the plan's prediction.
pub(crate) struct LoggedRun {
    pub(crate) loaded: Loaded,
    pub(crate) log: TrainingLog,
    pub(crate) steady: Steady,
    pub(crate) prediction: Prediction,
}

/// A plan with its prediction, and how many tokens and sequences a step has.
pub(crate) struct Planned {
    pub(crate) loaded: Loaded,
    pub(crate) prediction: Prediction,
    pub(crate) size: StepSize,
}

/// Reads a plan and predicts it.
pub(crate) fn plan(path: &Path) -> Result<Planned, CliError> {
    let loaded = plan::load(path)?;
    let workload = &loaded.costs.scenario().workload;
    let size = StepSize {
        tokens_per_gpu: workload.tokens_per_step() as f64 / workload.gpus as f64,
        sequences: workload.global_batch as f64,
    };
    let prediction = loaded.costs.predict(&loaded.strategy)?;
    Ok(Planned {
        loaded,
        prediction,
        size,
    })
}

/// Reads a log and predicts its plan.
pub(crate) fn read(log: &Path, plan: &Path, warmup: Option<usize>) -> Result<LoggedRun, CliError> {
    let Planned {
        loaded,
        prediction,
        size,
    } = self::plan(plan)?;
    let shown = log.display().to_string();
    let text = catalog::text::read(log)?;
    let parsed = training_log::parse(&text, &shown)?;
    let steady = parsed.steady(&shown, warmup, size)?;
    Ok(LoggedRun {
        loaded,
        log: parsed,
        steady,
        prediction,
    })
}
