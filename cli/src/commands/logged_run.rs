//! Reads a training log with the plan of its run.

use std::path::Path;

use accuracy::logged_run::LoggedRun;

use crate::commands::plan;
use crate::error::CliError;

/// Reads a log and predicts its plan.
pub(crate) fn read(log: &Path, plan: &Path, warmup: Option<usize>) -> Result<LoggedRun, CliError> {
    let plan = plan::of_log(plan)?;
    let text = catalog::text::read(log)?;
    let name = log.display().to_string();
    Ok(LoggedRun::read(plan, &text, &name, warmup)?)
}
