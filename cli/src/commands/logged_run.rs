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

/// Reads a log and predicts its plan.
pub(crate) fn read(log: &Path, plan: &Path, warmup: Option<usize>) -> Result<LoggedRun, CliError> {
    let loaded = plan::load(plan)?;
    let shown = log.display().to_string();
    let text = catalog::text::read(log)?;
    let parsed = training_log::parse(&text, &shown)?;
    let workload = &loaded.costs.scenario().workload;
    let size = StepSize {
        tokens_per_gpu: workload.tokens_per_step() as f64 / workload.gpus as f64,
        sequences: workload.global_batch as f64,
    };
    let steady = parsed.steady(&shown, warmup, size)?;
    let prediction = loaded.costs.predict(&loaded.strategy)?;
    Ok(LoggedRun {
        loaded,
        log: parsed,
        steady,
        prediction,
    })
}
