//! `explain`: shows where a plan's time and memory go, and what would change them.

use std::process::ExitCode;

use answers::explanation::{self, OfGroups};
use answers::{InputsJson, Planned};
use serde::Serialize;

use crate::args::ExplainArgs;
use crate::commands::{next, plan};
use crate::error::CliError;
use crate::output;

/// Runs `explain`.
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode, CliError> {
    match plan::planned(&args.plan)? {
        Planned::Alike(plan) => {
            note(args, &plan.inputs);
            let explained = explanation::explain(&plan, args.why_not.as_deref())?;
            show(args, &explained.document(), || {
                explained.text(output::style())
            })
        }
        Planned::Groups(..) if args.why_not.is_some() => {
            let what = "the plan has several groups of replicas";
            let path = args.plan.display();
            let expected = format!("one of its groups, such as {path}#1");
            Err(CliError::unexpected("--why-not", what, expected))
        }
        Planned::Groups(file, together) => {
            note(args, &together.inputs.json);
            let explained = OfGroups {
                file: &file,
                together: &together,
            };
            show(args, &explained.document(), || {
                explained.text(output::style())
            })
        }
    }
}

/// Prints a note if the runtime leaves out a part of the model.
fn note(args: &ExplainArgs, inputs: &InputsJson) {
    if let Some(what) = inputs.left_out() {
        let without = format!("note: {} is predicted {what}", inputs.model);
        output::note(args.output.quiet, &without);
    }
}

fn show(
    args: &ExplainArgs,
    document: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Result<ExitCode, CliError> {
    if args.output.json {
        output::json(document)?;
    } else {
        output::print(&text());
        next::terms(args.output);
    }
    Ok(ExitCode::SUCCESS)
}
