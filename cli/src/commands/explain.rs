//! `explain`: shows where a plan's time and memory go, and what would change them.

use std::process::ExitCode;

use answers::explanation;

use crate::args::ExplainArgs;
use crate::commands::{next, plan};
use crate::error::CliError;
use crate::output;

/// Runs `explain`.
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let explained = explanation::explain(&loaded, args.why_not.as_deref())?;
    if args.output.json {
        output::json(&explained.document())?;
    } else {
        output::print(&explained.text(output::style()));
        next::terms(args.output);
    }
    Ok(ExitCode::SUCCESS)
}
