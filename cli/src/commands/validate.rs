//! `validate`: published runs against predictions.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use rayon::prelude::*;
use serde::Serialize;
use spec::runs::{Run, RunsFile};

use crate::args::ValidateArgs;
use crate::error::{CliError, code};
use crate::output::{self, SCHEMA_VERSION};
use crate::validate::score::{Scored, score};
use crate::validate::summary::{self, Group, Stats};

#[derive(Serialize)]
struct ValidateJson {
    schema_version: u32,
    runs: Vec<Scored>,
    summary: Vec<Group>,
    skipped: Vec<(String, usize)>,
}

/// Runs `validate`.
pub(crate) fn run(args: &ValidateArgs) -> Result<ExitCode, CliError> {
    let mut runs = read(args)?;
    if let Some(part) = &args.only {
        runs.retain(|(run, _)| run.id.contains(part.as_str()));
    }
    if let Some(path) = &args.export {
        let complete: Vec<Run> = runs
            .iter()
            .map(|(run, _)| run)
            .filter(|run| matches!(run.tier.as_deref(), Some("A" | "B")))
            .cloned()
            .collect();
        output::write(path, &spec::runs::to_compact(&complete))?;
    }
    let scored: Vec<Scored> = runs
        .par_iter()
        .map(|(run, file)| score(run, file))
        .collect();
    let groups = summary::groups(&scored);
    let skipped = summary::skipped(&scored);
    if let Some(path) = &args.markdown {
        output::write(path, &markdown(&scored, &groups, &skipped))?;
    }
    let median = groups
        .iter()
        .find(|g| g.by == "all")
        .and_then(|g| g.step_time)
        .map(|s| s.median);
    if args.output.json {
        let document = ValidateJson {
            schema_version: SCHEMA_VERSION,
            runs: scored,
            summary: groups,
            skipped,
        };
        output::json(&document)?;
    } else {
        output::print(&text(&scored, &groups, &skipped, args.worst));
    }
    let outside = args.tolerance.is_some_and(|t| median.is_none_or(|m| m > t));
    Ok(if outside {
        ExitCode::from(code::OUTSIDE_TOLERANCE)
    } else {
        ExitCode::SUCCESS
    })
}

fn read(args: &ValidateArgs) -> Result<Vec<(Run, String)>, CliError> {
    if args.files.is_empty() {
        let embedded = spec::runs::embedded()?;
        return Ok(embedded
            .into_iter()
            .map(|run| (named(&run), run))
            .map(|(f, r)| (r, f))
            .collect());
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

/// The source of an embedded run: what stands before the revision.
fn named(run: &Run) -> String {
    run.source
        .split(['@', ':', ',', '('])
        .next()
        .unwrap_or("")
        .trim()
        .to_owned()
}

fn cell(stats: Option<Stats>) -> [String; 4] {
    match stats {
        None => [String::new(), String::new(), String::new(), String::new()],
        Some(s) => [
            s.count.to_string(),
            format!("{:.1}%", s.median * 100.0),
            format!("{:.1}%", s.p90 * 100.0),
            format!("{:+.1}%", s.bias * 100.0),
        ],
    }
}

const HEADER: [&str; 11] = [
    "by",
    "group",
    "runs",
    "median",
    "p90",
    "bias",
    "mem runs",
    "median",
    "p90",
    "bias",
    "too large",
];

fn rows(groups: &[Group]) -> Vec<Vec<String>> {
    groups
        .iter()
        .map(|g| {
            let mut row = vec![g.by.to_owned(), g.name.clone()];
            row.extend(cell(g.step_time));
            row.extend(cell(g.peak_memory));
            row.push(g.wrongly_too_large.to_string());
            row
        })
        .collect()
}

fn text(scored: &[Scored], groups: &[Group], skipped: &[(String, usize)], worst: usize) -> String {
    let mut text = counts(scored);
    text.push('\n');
    text.push_str(&reports::terminal::plain(&HEADER, &rows(groups)));
    text.push_str("\nNot predicted\n");
    for (reason, count) in skipped.iter().take(12) {
        let _ = writeln!(text, "  {count:>4}  {reason}");
    }
    text.push_str("\nLargest errors of step time\n");
    text.push_str(&reports::terminal::plain(
        &WORST,
        &worst_rows(scored, worst),
    ));
    text
}

fn counts(scored: &[Scored]) -> String {
    let complete = scored.iter().filter(|s| summary::is_complete(s)).count();
    let predicted = scored
        .iter()
        .filter(|s| summary::is_complete(s) && s.predicted.is_some())
        .count();
    let ooms = scored
        .iter()
        .filter(|s| s.status == "oom" && s.predicted.is_some());
    let caught = ooms
        .clone()
        .filter(|s| s.predicted.as_ref().is_some_and(|p| !p.fits))
        .count();
    format!(
        "{} runs; {complete} with complete facts, of which {predicted} predicted ({:.1}%); {caught} of {} out-of-memory runs predicted not to fit\n",
        scored.len(),
        predicted as f64 / complete.max(1) as f64 * 100.0,
        ooms.count(),
    )
}

const WORST: [&str; 10] = [
    "run",
    "error",
    "measured s",
    "predicted s",
    "compute",
    "recompute",
    "tp",
    "dp",
    "bubble+pp",
    "host+opt",
];

fn worst_rows(scored: &[Scored], most: usize) -> Vec<Vec<String>> {
    let mut list: Vec<&Scored> = scored
        .iter()
        .filter(|s| summary::is_complete(s) && s.error.step_time.is_some())
        .collect();
    list.sort_by(|a, b| {
        let size = |s: &Scored| s.error.step_time.unwrap_or(0.0).abs();
        size(b).total_cmp(&size(a))
    });
    list.into_iter()
        .take(most)
        .filter_map(|s| {
            let p = s.predicted.as_ref()?;
            let b = &p.breakdown;
            let share = |x: f64| format!("{:.0}%", x / p.step_time_s * 100.0);
            Some(vec![
                s.id.clone(),
                format!("{:+.0}%", s.error.step_time? * 100.0),
                format!("{:.3}", s.measured.step_time_s?),
                format!("{:.3}", p.step_time_s),
                share(b.compute_s),
                share(b.recompute_s),
                share(b.tp_exposed_s + b.cp_exposed_s + b.ep_exposed_s),
                share(b.dp_exposed_s),
                share(b.bubble_s + b.pp_exposed_s),
                share(b.host_s + b.optimizer_s),
            ])
        })
        .collect()
}

fn markdown(scored: &[Scored], groups: &[Group], skipped: &[(String, usize)]) -> String {
    let mut text = String::from(
        "# Accuracy\n\nPredictions of published training runs from their configuration alone. \
         Made by `vescale-plan validate --markdown ACCURACY.md`; error = predicted/measured − 1.\n\n",
    );
    text.push_str(&counts(scored));
    text.push('\n');
    table(&mut text, &HEADER, &rows(groups));
    text.push_str("\n## Not predicted\n\n");
    let list: Vec<Vec<String>> = skipped
        .iter()
        .map(|(r, c)| vec![r.clone(), c.to_string()])
        .collect();
    table(&mut text, &["reason", "runs"], &list);
    text.push_str("\n## Largest errors of step time\n\n");
    table(&mut text, &WORST, &worst_rows(scored, 30));
    text
}

fn table(text: &mut String, header: &[&str], rows: &[Vec<String>]) {
    let _ = writeln!(text, "| {} |", header.join(" | "));
    let _ = writeln!(text, "|{}", "---|".repeat(header.len()));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
}
