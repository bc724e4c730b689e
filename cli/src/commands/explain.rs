//! `explain`: shows where a plan's time and memory go, and what would change them.

use std::process::ExitCode;

use answers::explanation::{self, OfGroups};
use answers::{Opened, Together, opened};
use catalog::Mistake;
use plans::PlanFile;

use crate::args::ExplainArgs;
use crate::commands::next;
use crate::error::CliError;
use crate::output;

/// Runs `explain`.
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode, CliError> {
    let file = opened::read(&args.plan)?;
    if !file.groups.is_empty() {
        return of_groups(args, &file);
    }
    let loaded = Opened::of(file, &args.plan)?;
    let explained = explanation::explain(&loaded, args.why_not.as_deref())?;
    if args.output.json {
        output::json(&explained.document())?;
    } else {
        output::print(&explained.text(output::style()));
        next::terms(args.output);
    }
    Ok(ExitCode::SUCCESS)
}

/// Explains a plan of several groups of replicas.
fn of_groups(args: &ExplainArgs, file: &PlanFile) -> Result<ExitCode, CliError> {
    if args.why_not.is_some() {
        let wrong = Mistake::new("the plan has several groups of replicas").at("--why-not");
        let path = args.plan.display();
        return Err(CliError::Input(
            wrong.expected(format!("one of its groups, such as {path}#1")),
        ));
    }
    let together = Together::of_plan(file, &args.plan)?;
    let explained = OfGroups {
        file,
        together: &together,
    };
    if args.output.json {
        output::json(&explained.document())?;
    } else {
        output::print(&explained.text(output::style()));
        next::terms(args.output);
    }
    Ok(ExitCode::SUCCESS)
}
