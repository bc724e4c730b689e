//! `compare`: compares two plans, part by part.

use std::process::ExitCode;

use answers::comparison;
use catalog::files::Kind;

use crate::args::CompareArgs;
use crate::commands::{next, plan};
use crate::destinations::Target;
use crate::error::CliError;
use crate::output;

/// Runs `compare`.
pub(crate) fn run(args: &CompareArgs) -> Result<ExitCode, CliError> {
    let compared =
        comparison::compare(&plan::planned(&args.first)?, &plan::planned(&args.second)?)?;
    if let Some(path) = &args.report {
        let to = Target::named(path, Kind::Report, args.force)?;
        let paths = [&args.first, &args.second].into_iter().chain(&args.others);
        let plans = paths.map(|path| Ok((path.display().to_string(), plan::planned(path)?)));
        let plans = plans.collect::<Result<Vec<_>, CliError>>()?;
        to.write(&comparison::page(&plans)?)?;
        to.say(args.output.quiet, "report");
    }
    if args.output.json {
        output::json(&compared.document())?;
    } else {
        let names = [&args.first, &args.second].map(|path| path.display().to_string());
        let names = names.each_ref().map(String::as_str);
        output::print(&compared.text(names, output::style()));
        next::terms(args.output);
    }
    Ok(ExitCode::SUCCESS)
}
