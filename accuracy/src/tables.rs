//! The error report as tables for a terminal.

use std::fmt::Write as _;

use catalog::runs::Status;

use super::ablation::Ablation;
use super::assumptions::Tested;
use super::fits::Band;
use super::intervals::Coverage;
use super::refit::{Equal, LeftOut};
use super::report::Report;
use super::score::Scored;
use super::summary::{self, Group, Stats};
use super::sweeps::Ranking;

impl Report {
    /// Writes the report for a terminal, with the `worst` predictions.
    #[must_use]
    pub fn text(&self, worst: usize) -> String {
        text(self, worst)
    }
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

pub(crate) const HEADER: [&str; 11] = [
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

pub(crate) fn rows(groups: &[Group]) -> Vec<Vec<String>> {
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

fn text(report: &Report, worst: usize) -> String {
    let mut text = counts(&report.runs);
    text.push('\n');
    text.push_str(&reports::terminal::plain(&HEADER, &rows(&report.summary)));
    let _ = writeln!(text, "\n{}", coverage(&report.intervals));
    let _ = writeln!(text, "{}", ranking(&report.ranking));
    if let Some(refit) = &report.leave_source_out {
        let _ = writeln!(text, "\n{}", left_out(refit));
        text.push_str(&reports::terminal::plain(&SOURCES, &source_rows(refit)));
        text.push('\n');
        text.push_str(&reports::terminal::plain(&FITS, &fits_rows(refit)));
        if !refit.few_shot.is_empty() {
            text.push('\n');
            text.push_str(&reports::terminal::plain(&FEW_SHOT, &few_shot_rows(refit)));
        }
        text.push('\n');
        text.push_str(&reports::terminal::plain(&CONSTANTS, &constant_rows(refit)));
    }
    if !report.ablations.is_empty() {
        text.push_str("\nErrors with and without each mechanism, every source weighing the same\n");
        let rows = ablation_rows(&report.ablations);
        text.push_str(&reports::terminal::plain(&ABLATIONS, &rows));
    }
    text.push_str("\nNot predicted\n");
    for (reason, count) in report.skipped.iter().take(12) {
        let _ = writeln!(text, "  {count:>4}  {reason}");
    }
    text.push_str("\nLargest errors of step time\n");
    text.push_str(&reports::terminal::plain(
        &WORST,
        &worst_rows(&report.runs, worst),
    ));
    text
}

/// One sentence per quantity on how often its interval holds.
pub(crate) fn coverage(intervals: &[Coverage]) -> String {
    intervals
        .iter()
        .filter(|c| c.runs > 0)
        .map(|c| {
            format!(
                "80% interval of {}: {:.0}% of {} runs inside; {:.0}% inside intervals made from other sources only.",
                c.quantity,
                c.inside * 100.0,
                c.runs,
                c.left_out_inside * 100.0,
            )
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// One sentence on the sweeps.
pub(crate) fn ranking(r: &Ranking) -> String {
    let percent =
        |v: Option<f64>| v.map_or_else(|| "–".to_owned(), |v| format!("{:.1}%", v * 100.0));
    format!(
        "{} sweeps: mean Kendall τ {}; the chosen strategy is within 3% of the fastest in {}, mean regret {}, \
         largest {}.",
        r.sweeps,
        r.mean_tau
            .map_or_else(|| "–".to_owned(), |t| format!("{t:.2}")),
        r.within_3_percent,
        percent(r.mean_regret),
        percent(r.largest_regret)
    )
}

pub(crate) fn counts(scored: &[Scored]) -> String {
    let complete = scored.iter().filter(|s| summary::is_complete(s)).count();
    let predicted = scored
        .iter()
        .filter(|s| summary::is_complete(s) && s.predicted.is_some())
        .count();
    let ooms = scored
        .iter()
        .filter(|s| s.status == Status::Oom && s.predicted.is_some());
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

/// Headers of the table of how often runs fit.
pub(crate) const FITS: [&str; 4] = ["P(fits)", "runs", "fitted", "mean P(fits)"];

pub(crate) fn fits_rows(found: &LeftOut) -> Vec<Vec<String>> {
    let percent = |v: f64| format!("{:.0}%", v * 100.0);
    let row = |band: &Band| {
        let share = |count: usize| percent(count as f64 / band.runs as f64);
        vec![
            format!("{} to {}", percent(band.from), percent(band.to)),
            band.runs.to_string(),
            match band.runs {
                0 => String::new(),
                _ => format!("{} ({})", band.fitted, share(band.fitted)),
            },
            match band.runs {
                0 => String::new(),
                _ => percent(band.mean),
            },
        ]
    };
    found.fits.iter().map(row).collect()
}

/// Headers of the table of what `calibrate` assumes.
pub(crate) const ASSUMPTIONS: [&str; 4] = ["assumption", "value", "halved", "doubled"];

pub(crate) fn assumption_rows(found: &LeftOut) -> Vec<Vec<String>> {
    let row = |tested: &Tested| {
        vec![
            tested.name.to_owned(),
            format!("{}", tested.value),
            format!("{:+.3}", tested.halved),
            format!("{:+.3}", tested.doubled),
        ]
    };
    found.assumptions.iter().map(row).collect()
}

/// The results of leaving each source out, in sentences.
pub(crate) fn left_out(found: &LeftOut) -> String {
    let percent = |v: f64| format!("{:.1}%", v * 100.0);
    let quantiles = |e: Option<Equal>| {
        e.map_or_else(
            || "–".to_owned(),
            |e| {
                format!(
                    "median {}, 90th percentile {}",
                    percent(e.median),
                    percent(e.p90)
                )
            },
        )
    };
    format!(
        "Each source predicted with constants fitted on the others, every source weighing the same: step time {}; \
         memory {}; {} runs that ran are predicted not to fit.\n{}\n{}",
        quantiles(found.step_time),
        quantiles(found.peak_memory),
        found.wrongly_too_large,
        ranking(&found.ranking),
        coverage(&found.intervals),
    )
}

pub(crate) const SOURCES: [&str; 8] = [
    "source left out",
    "runs",
    "shipped",
    "p90",
    "left out",
    "p90",
    "memory shipped",
    "memory left out",
];

pub(crate) fn source_rows(found: &LeftOut) -> Vec<Vec<String>> {
    let percent = |v: Option<f64>| v.map_or_else(String::new, |v| format!("{:.1}%", v * 100.0));
    let median = |s: Option<Stats>| percent(s.map(|s| s.median));
    let p90 = |s: Option<Stats>| percent(s.map(|s| s.p90));
    let sources = found.sources.iter();
    sources
        .map(|source| {
            vec![
                source.name.clone(),
                source
                    .shipped
                    .map_or_else(String::new, |s| s.count.to_string()),
                median(source.shipped),
                p90(source.shipped),
                median(source.left_out),
                p90(source.left_out),
                median(source.memory_shipped),
                median(source.memory_left_out),
            ]
        })
        .collect()
}

/// Headers of the table of errors after some runs of each source are known.
pub(crate) const FEW_SHOT: [&str; 5] = [
    "source left out",
    "configurations",
    "known runs",
    "median of the others",
    "p90",
];

pub(crate) fn few_shot_rows(found: &LeftOut) -> Vec<Vec<String>> {
    let percent = |v: f64| format!("{:.1}%", v * 100.0);
    let of_known = found.few_shot.iter();
    let rows = of_known.flat_map(|few| {
        let row = |name: &str, configurations: String, median, p90| {
            let known = few.known.to_string();
            vec![
                name.to_owned(),
                configurations,
                known,
                percent(median),
                percent(p90),
            ]
        };
        let all = row(
            "all, each weighing the same",
            String::new(),
            few.median,
            few.p90,
        );
        let sources = few.sources.iter();
        let own = sources.map(move |s| row(&s.name, s.configurations.to_string(), s.median, s.p90));
        std::iter::once(all).chain(own)
    });
    rows.collect()
}

/// Headers of the table of errors with and without each mechanism.
pub(crate) const ABLATIONS: [&str; 8] = [
    "mechanism",
    "of",
    "runs",
    "sources",
    "median without",
    "with",
    "p90 without",
    "with",
];

pub(crate) fn ablation_rows(found: &[Ablation]) -> Vec<Vec<String>> {
    let percent = |v: f64| format!("{:.1}%", v * 100.0);
    let rows = found.iter().map(|ablation| {
        let [median_without, p90_without] = ablation.without.map(percent);
        let [median_with, p90_with] = ablation.with.map(percent);
        vec![
            ablation.mechanism.clone(),
            ablation.quantity.to_owned(),
            ablation.runs.to_string(),
            ablation.sources.to_string(),
            median_without,
            median_with,
            p90_without,
            p90_with,
        ]
    });
    rows.collect()
}

pub(crate) const CONSTANTS: [&str; 6] = [
    "constant",
    "sources",
    "benchmarks alone",
    "shipped",
    "fitted on all",
    "without one source",
];

pub(crate) fn constant_rows(found: &LeftOut) -> Vec<Vec<String>> {
    found
        .constants
        .iter()
        .enumerate()
        .map(|(index, constant)| {
            let values = found.sources.iter().map(|source| source.constants[index]);
            let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
                (v.min(low), v.max(high))
            });
            let short = |v: f64| format!("{}", (v * 1000.0).round() / 1000.0);
            vec![
                constant.name.clone(),
                constant.sources.to_string(),
                short(constant.prior),
                short(constant.shipped),
                short(constant.all),
                format!("{} – {}", short(low), short(high)),
            ]
        })
        .collect()
}

pub(crate) const WORST: [&str; 10] = [
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

pub(crate) fn worst_rows(scored: &[Scored], most: usize) -> Vec<Vec<String>> {
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
                share(b.host_s + b.optimizer_s + b.offload_exposed_s),
            ])
        })
        .collect()
}
