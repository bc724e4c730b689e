//! `trace`: writes the predicted timeline for Perfetto.

use std::process::ExitCode;

use answers::file_names;
use catalog::files::Kind;

use crate::args::TraceArgs;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::CliError;

/// Runs `trace`.
pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| file_names::derived(&args.plan, "trace.json"));
    let to = Target::named(&path, Kind::Trace, args.force)?;
    let timeline = loaded.costs.timeline(&loaded.strategy)?;
    to.write(&format!("{}\n", reports::perfetto::trace(&timeline)))?;
    to.say(args.quiet.quiet, "trace");
    Ok(ExitCode::SUCCESS)
}
