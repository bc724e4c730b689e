//! `report`: writes the HTML report of a plan file.

use std::process::ExitCode;

use answers::{Planned, file_names, report};
use catalog::files::Kind;

use crate::args::ReportArgs;
use crate::budget;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::CliError;

/// Runs `report`.
pub(crate) fn run(args: &ReportArgs) -> Result<ExitCode, CliError> {
    let plan = plan::planned(&args.plan)?;
    let path = args
        .output
        .clone()
        .unwrap_or_else(|| file_names::derived(&args.plan, file_names::REPORT));
    let to = Target::named(&path, Kind::Report, args.force)?;
    let html = match &plan {
        Planned::Alike(plan) => {
            let training = budget::training(&args.budget, &plan.scenario)?;
            report::of_plan(plan, &args.plan, training)?
        }
        Planned::Groups(file, together) => {
            let training = budget::training(&args.budget, &together.inputs.scenario)?;
            report::of_plan_of_groups(file, together, &args.plan, training)?
        }
    };
    to.write(&html)?;
    to.say(args.quiet.quiet, "report");
    Ok(ExitCode::SUCCESS)
}
