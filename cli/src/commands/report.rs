//! `report`: writes the HTML report of a plan file.

use std::process::ExitCode;

use answers::{file_names, report};
use catalog::files::Kind;

use crate::args::ReportArgs;
use crate::budget;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::CliError;

/// Runs `report`.
pub(crate) fn run(args: &ReportArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| file_names::derived(&args.plan, file_names::REPORT));
    let to = Target::named(&path, Kind::Report, args.force)?;
    let training = budget::training(
        &args.budget,
        &loaded.scenario.cluster,
        loaded.inputs.parameters,
    )?;
    to.write(&report::of_plan(&loaded, &args.plan, training)?)?;
    to.say(args.quiet.quiet, "report");
    Ok(ExitCode::SUCCESS)
}
