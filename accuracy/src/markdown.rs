//! The error report as Markdown, with its plots.

use std::fmt::Write as _;

use catalog::runs::Status;

use super::kernels;
use super::plot::{self, Point};
use super::refit::LeftOut;
use super::report::Report;
use super::score::{Predicted, Scored};
use super::summary::is_complete;
use super::tables::{self, HEADER, WORST};

/// File names of the plots that the Markdown shows.
pub const PLOTS: [&str; 2] = ["step-time.svg", "peak-memory.svg"];

impl Report {
    /// The report as Markdown that shows the plots of the folder `plots`.
    #[must_use]
    pub fn markdown(&self, plots: &str) -> String {
        text(self, plots)
    }

    /// The plots that the Markdown shows as SVG, in the order of [`PLOTS`].
    #[must_use]
    pub fn plots(&self) -> [String; 2] {
        plots(self)
    }
}

/// Writes the results of leaving each source out of the fit.
fn left_out(text: &mut String, refit: &LeftOut) {
    let _ = writeln!(
        text,
        "\n## Sources left out\n\n{}\n\nSteps with costs that a source does not publish (another optimizer than Adam, \
         fixed costs of a step) count in the first figure after one run of the source is known; they have no row \
         under `left out`.\n",
        tables::left_out(refit)
    );
    table(text, &tables::SOURCES, &tables::source_rows(refit));
    text.push_str(
        "\nRuns by their probability to fit, given by the runs of other sources that fitted or did not; runs out of memory \
         count as not fitted.\n\n",
    );
    table(text, &tables::FITS, &tables::fits_rows(refit));
    text.push('\n');
    if !refit.few_shot.is_empty() {
        text.push_str(
            "\nAfter some runs of the left-out source are known, drawn 50 times with a seed; four factors of time \
             (compute, memory, network, host) are fitted to them alone, as `calibrate` does. Means over the draws \
             of errors on its other configurations.\n\n",
        );
        table(text, &tables::FEW_SHOT, &tables::few_shot_rows(refit));
        text.push_str(
            "\nWhat `calibrate` assumes about a system before any of its steps is measured. Of each source 1, 3 and 6 runs are \
             drawn, 50 times: change of the mean logarithm of a run's probability if an assumption is halved or doubled, every \
             source weighing the same.\n\n",
        );
        table(text, &tables::ASSUMPTIONS, &tables::assumption_rows(refit));
        text.push('\n');
    }
    table(text, &tables::CONSTANTS, &tables::constant_rows(refit));
}

/// Writes the report; `plots` is the folder of its figures.
fn text(report: &Report, plots: &str) -> String {
    let mut text = String::from(
        "# Accuracy\n\nPredictions of published training runs from their configuration alone. \
         Made by `vescale-plan validate --leave-source-out --few-shot 0,1,3 --ablate --markdown ACCURACY.md`; error = predicted/measured − 1. \
         What the errors are made of: [docs/accuracy.md](docs/accuracy.md).\n\n",
    );
    text.push_str(&tables::counts(&report.runs));
    let _ = writeln!(
        text,
        "\n{}\n",
        tables::coverage(&report.intervals).replace('\n', "\n\n")
    );
    let _ = writeln!(text, "{}\n", tables::ranking(&report.ranking));
    for name in PLOTS {
        let _ = writeln!(text, "![{name}]({plots}/{name})\n");
    }
    table(&mut text, &HEADER, &tables::rows(&report.summary));
    if let Some(refit) = &report.leave_source_out {
        left_out(&mut text, refit);
    }
    if !report.ablations.is_empty() {
        text.push_str(
            "\n## Mechanisms\n\nErrors of the runs that a mechanism touches, with it and without it, every source \
             weighing the same, under the shipped constants (`vescale-plan validate --ablate`).\n\n",
        );
        let rows = tables::ablation_rows(&report.ablations);
        table(&mut text, &tables::ABLATIONS, &rows);
    }
    text.push_str("\n## Sweeps\n\n");
    table(&mut text, &SWEEPS, &sweep_rows(report));
    text.push_str(
        "\n## Kernel tables\n\nEvery point left out and interpolated from its neighbours, twice as far apart as \
         the table's own steps.\n\n",
    );
    table(&mut text, &kernels::HEADER, &kernels::rows());
    text.push_str(
        "\nThe best square product of 1024, 2048, 4096, 8192 and 10240 in 16 bits, in short runs, on GPUs with tables and on GPUs \
         that borrow one (zzc0721/torch-performance-test-data@9d82827):\n\n",
    );
    table(&mut text, &kernels::SQUARES, &kernels::square_rows());
    text.push_str(
        "\nFits of one-node collectives to their measurements of 8 MB and more, the worst over 2, 4 and 8 \
         ranks:\n\n",
    );
    table(
        &mut text,
        &kernels::COLLECTIVES,
        &kernels::collective_rows(),
    );
    text.push_str("\n## Not predicted\n\n");
    let list: Vec<Vec<String>> = report
        .skipped
        .iter()
        .map(|(r, c)| vec![r.clone(), c.to_string()])
        .collect();
    table(&mut text, &["reason", "runs"], &list);
    text.push_str("\n## Largest errors of step time\n\n");
    table(&mut text, &WORST, &tables::worst_rows(&report.runs, 30));
    text
}

fn plots(report: &Report) -> [String; 2] {
    let complete = || {
        report
            .runs
            .iter()
            .filter(|s| is_complete(s) && s.status == Status::Ok)
    };
    let points = |measured: fn(&Scored) -> Option<f64>, predicted: fn(&Predicted) -> f64, unit| {
        let found = complete().filter_map(|s| {
            Some(Point {
                measured: measured(s)? / unit,
                predicted: predicted(s.predicted.as_ref()?) / unit,
                source: &s.file,
            })
        });
        found.collect::<Vec<Point<'_>>>()
    };
    let time = points(|s| s.measured.step_time_s, |p| p.step_time_s, 1.0);
    let memory = points(
        |s| s.measured.peak_memory_bytes,
        |p| p.peak_memory_bytes,
        1024f64.powi(3),
    );
    [
        plot::svg("Step time, with a band of ±10%", "s", &time),
        plot::svg("Peak memory, with a band of ±10%", "GiB", &memory),
    ]
}

const SWEEPS: [&str; 6] = [
    "sweep",
    "strategies",
    "pairs",
    "Kendall τ",
    "regret",
    "chosen",
];

fn sweep_rows(report: &Report) -> Vec<Vec<String>> {
    report
        .sweeps
        .iter()
        .map(|s| {
            vec![
                s.name.clone(),
                s.strategies.to_string(),
                s.pairs.to_string(),
                s.kendall_tau
                    .map_or_else(String::new, |t| format!("{t:.2}")),
                format!("{:.1}%", s.regret * 100.0),
                s.chosen.clone(),
            ]
        })
        .collect()
}

fn table(text: &mut String, header: &[&str], rows: &[Vec<String>]) {
    let _ = writeln!(text, "| {} |", header.join(" | "));
    let _ = writeln!(text, "|{}", "---|".repeat(header.len()));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
}
