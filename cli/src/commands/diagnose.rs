//! `diagnose`: compares a training log with its plan.

use std::process::ExitCode;

use accuracy::diagnosis::Diagnosis;
use catalog::files::Kind;

use crate::args::DiagnoseArgs;
use crate::commands::{calibrate, follow, logged_run};
use crate::destinations::Target;
use crate::error::CliError;
use crate::output;

/// Runs `diagnose`.
pub(crate) fn run(args: &DiagnoseArgs) -> Result<ExitCode, CliError> {
    if args.follow {
        return follow::run(args);
    }
    let calibrated = Target::optional(args.calibrate.as_ref(), Kind::Cluster, args.force)?;
    let run = logged_run::read(&args.log, &args.plan, args.warmup)?;
    let diagnosis = Diagnosis::of(&run)?;
    let saved = calibrated.map(|to| {
        let measured = calibrate::Measured::of_log(&run, &args.log, &args.plan)?;
        calibrate::write(&to, vec![measured], args.format.quiet)?;
        to.say(args.format.quiet, "cluster");
        Ok::<_, CliError>(())
    });
    for note in run.notes() {
        output::note(args.format.quiet, &format!("note: {note}"));
    }
    for warning in run.warnings() {
        output::warning(&warning);
    }
    if args.format.json {
        let path = args.calibrate.as_ref().map(|p| p.display().to_string());
        output::json(&diagnosis.document(path.as_deref()))?;
    } else {
        output::print(&diagnosis.text());
    }
    saved.transpose()?;
    Ok(ExitCode::SUCCESS)
}
