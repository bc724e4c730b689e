//! `validate`: compares predictions with published runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accuracy::Report;
use answers::SCHEMA_VERSION;
use catalog::Fitted;
use catalog::files::Kind;
use catalog::runs::{Run, RunsFile, Tier};
use serde::Serialize;

use crate::args::ValidateArgs;
use crate::destinations::{Target, distinct};
use crate::error::{CliError, code};
use crate::output::{self, Progress, note};

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
        if runs.is_empty() {
            let what = "no run has an id that contains this";
            let expected = "a part of a run's id, such as llama3";
            return Err(CliError::unexpected(
                format!("--only {part}"),
                what,
                expected,
            ));
        }
    }
    let files = Files::check(args)?;
    if let Some(path) = &args.export {
        let usable: Vec<Run> = runs
            .iter()
            .map(|(run, _)| run)
            .filter(|run| {
                matches!(run.tier, Some(Tier::A | Tier::B)) || accuracy::is_predictable(run)
            })
            .cloned()
            .collect();
        let to = Target::named(path, Kind::PublishedRuns, args.force)?;
        to.write(&catalog::runs::to_compact(&usable))?;
    }
    let constants = match &args.constants {
        Some(path) => catalog::fitted::load(path)?,
        None => Fitted::default(),
    };
    let report = predicted(args, &runs, &constants);
    let saved = files.write(&report);
    if args.output.json {
        output::json(&ValidateJson {
            schema_version: SCHEMA_VERSION,
            report: &report,
        })?;
    } else {
        output::print(&report.text(args.worst));
    }
    saved?;
    let grown = match &args.baseline {
        Some(path) => report.worse_than(&catalog::text::read(path)?),
        None => Vec::new(),
    };
    for group in &grown {
        note(
            args.output.quiet,
            &format!("worse than the baseline: {group}"),
        );
    }
    let median = report.median_error();
    let outside = args.tolerance.is_some_and(|t| median.is_none_or(|m| m > t));
    let good = !outside && grown.is_empty();
    Ok(code::unless(good, code::OUTSIDE_TOLERANCE))
}

/// Predicts the runs in all the ways that are asked for.
fn predicted(args: &ValidateArgs, runs: &[(Run, String)], constants: &Fitted) -> Report {
    let quiet = args.output.quiet || args.output.json;
    let bar = Progress::new(quiet, "predicting");
    let mut report = Report::new(runs, constants, &|share| bar.update(share));
    bar.finish();
    if args.leave_source_out {
        let bar = Progress::new(quiet, "fitting without one source after another");
        report = report.with_leave_source_out(runs, &args.few_shot, &|share| {
            bar.update(share);
        });
        bar.finish();
    }
    if args.ablate {
        let bar = Progress::new(quiet, "predicting without one mechanism after another");
        report = report.with_ablations(runs, &|share| bar.update(share));
        bar.finish();
    }
    report
}

/// Files to write beside the answer, checked before the runs are predicted.
struct Files {
    residuals: Option<Target>,
    baseline: Option<Target>,
    markdown: Option<Target>,
    /// The plots that the Markdown includes, which are written to `folder`.
    plots: Vec<Target>,
    folder: PathBuf,
}

impl Files {
    fn check(args: &ValidateArgs) -> Result<Self, CliError> {
        distinct(&[
            ("--markdown", args.markdown.as_deref()),
            ("--residuals", args.residuals.as_deref()),
            ("--write-baseline", args.write_baseline.as_deref()),
            ("--export", args.export.as_deref()),
        ])?;
        let to = |path: &Option<PathBuf>, kind| Target::optional(path.as_ref(), kind, args.force);
        let plot = |name| {
            Ok(Target::named(
                &args.plots.join(name),
                Kind::Plot,
                args.force,
            )?)
        };
        let plots: Result<_, CliError> = match args.markdown {
            Some(_) => accuracy::PLOTS.into_iter().map(plot).collect(),
            None => Ok(Vec::new()),
        };
        Ok(Self {
            residuals: to(&args.residuals, Kind::Residuals)?,
            baseline: to(&args.write_baseline, Kind::Baseline)?,
            markdown: to(&args.markdown, Kind::AccuracyReport)?,
            plots: plots?,
            folder: args.plots.clone(),
        })
    }

    fn write(&self, report: &Report) -> Result<(), CliError> {
        // The option requires `--leave-source-out`, so there are residuals.
        if let Some((to, residuals)) = self.residuals.as_ref().zip(report.residuals()) {
            to.write(&residuals)?;
        }
        if let Some(to) = &self.baseline {
            to.write(&report.baseline())?;
        }
        let Some(to) = &self.markdown else {
            return Ok(());
        };
        let shown = self.folder.display().to_string();
        to.write(&report.markdown(&shown))?;
        for (to, svg) in self.plots.iter().zip(report.plots()) {
            to.write(&svg)?;
        }
        Ok(())
    }
}

fn read(args: &ValidateArgs) -> Result<Vec<(Run, String)>, CliError> {
    if args.files.is_empty() {
        return Ok(accuracy::embedded()?);
    }
    let mut runs = Vec::new();
    for path in &args.files {
        let shown = path.display().to_string();
        let file = RunsFile::parse(&catalog::text::read(path)?, &shown)?;
        let name = stem(path);
        runs.extend(file.runs.into_iter().map(|run| (run, name.clone())));
    }
    Ok(runs)
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .map_or_else(String::new, |s| s.to_string_lossy().into_owned())
}
