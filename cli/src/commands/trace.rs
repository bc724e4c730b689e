//! `trace`: the predicted timeline for Perfetto.

use std::process::ExitCode;

use crate::args::TraceArgs;
use crate::commands::plan;
use crate::error::CliError;
use crate::output;

/// Runs `trace`.
pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let timeline = loaded.costs.timeline(&loaded.strategy)?;
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| plan::derived(&args.plan, "trace.json"));
    output::write(&path, &format!("{}\n", reports::perfetto::trace(&timeline)))?;
    output::note(false, &format!("trace {}", path.display()));
    Ok(ExitCode::SUCCESS)
}
