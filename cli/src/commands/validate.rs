//! `validate`: published runs against predictions.

use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;
use spec::Fitted;
use spec::runs::{Run, RunsFile};

use crate::args::ValidateArgs;
use crate::error::{CliError, code};
use crate::output::{self, SCHEMA_VERSION, note};
use crate::validate::{Report, baseline, intervals, mapping, markdown, refit, tables};

#[derive(Serialize)]
struct ValidateJson<'a> {
    schema_version: u32,
    #[serde(flatten)]
    report: &'a Report,
}

/// Runs `validate`.
pub(crate) fn run(args: &ValidateArgs) -> Result<ExitCode, CliError> {
    let mut runs = read(args)?;
    if let Some(part) = &args.only {
        runs.retain(|(run, _)| run.id.contains(part.as_str()));
    }
    if let Some(path) = &args.export {
        let usable: Vec<Run> = runs
            .iter()
            .map(|(run, _)| run)
            .filter(|run| {
                matches!(run.tier.as_deref(), Some("A" | "B")) || mapping::map(run).is_ok()
            })
            .cloned()
            .collect();
        output::write(path, &spec::runs::to_compact(&usable))?;
    }
    let constants = match &args.constants {
        Some(path) => spec::fitted::load(path)?,
        None => Fitted::default(),
    };
    let mut report = Report::new(&runs, &constants);
    if args.leave_one_out {
        report.leave_one_out = Some(refit::leave_one_out(&runs));
    }
    write_files(args, &report)?;
    if args.output.json {
        output::json(&ValidateJson {
            schema_version: SCHEMA_VERSION,
            report: &report,
        })?;
    } else {
        output::print(&tables::text(&report, args.worst));
    }
    let grown = match &args.baseline {
        Some(path) => baseline::grown(&report.summary, &spec::text::read(path)?),
        None => Vec::new(),
    };
    for group in &grown {
        note(
            args.output.quiet,
            &format!("worse than the baseline: {group}"),
        );
    }
    let median = report
        .summary
        .iter()
        .find(|g| g.by == "all")
        .and_then(|g| g.step_time)
        .map(|s| s.median);
    let outside = args.tolerance.is_some_and(|t| median.is_none_or(|m| m > t));
    Ok(if outside || !grown.is_empty() {
        ExitCode::from(code::OUTSIDE_TOLERANCE)
    } else {
        ExitCode::SUCCESS
    })
}

fn write_files(args: &ValidateArgs, report: &Report) -> Result<(), CliError> {
    if let Some(path) = &args.residuals {
        output::write(path, &intervals::table(&report.runs, &report.sweeps))?;
    }
    if let Some(path) = &args.write_baseline {
        output::write(path, &baseline::text(&report.summary))?;
    }
    let Some(path) = &args.markdown else {
        return Ok(());
    };
    let shown = args.plots.display().to_string();
    output::write(path, &markdown::text(report, &shown))?;
    for (name, svg) in markdown::plots(report) {
        output::write(&args.plots.join(name), &svg)?;
    }
    Ok(())
}

fn read(args: &ValidateArgs) -> Result<Vec<(Run, String)>, CliError> {
    if args.files.is_empty() {
        return Ok(crate::validate::embedded()?);
    }
    let mut runs = Vec::new();
    for path in &args.files {
        let shown = path.display().to_string();
        let file = RunsFile::parse(&spec::text::read(path)?, &shown)?;
        let name = stem(path);
        runs.extend(file.runs.into_iter().map(|run| (run, name.clone())));
    }
    Ok(runs)
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .map_or_else(String::new, |s| s.to_string_lossy().into_owned())
}
