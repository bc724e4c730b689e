//! `size`: finds how many GPUs to use.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use answers::SCHEMA_VERSION;
use answers::launch::{self, Step};
use answers::{Budget, Inputs, InputsJson, Training};
use catalog::{Mistake, Seconds};
use costmodel::{CostModel, Scenario};
use planner::size::{Sized, sized, usual_counts};
use planner::{PlannerError, SearchOptions};
use plans::json::CandidateJson;
use reports::{format, lines::of};
use serde::Serialize;

use crate::args::{ScenarioArgs, SizeArgs};
use crate::budget;
use crate::commands::next;
use crate::commands::search;
use crate::error::{CliError, code};
use crate::inputs;
use crate::output::{self, Progress, note};
use answers::values::Gpus;

/// Largest number of GPUs that is tried when none are given.
const DEFAULT_MOST: u64 = 2048;
/// Largest odd number that the default batch is a multiple of.
const MOST_ODD: u64 = 315;

#[derive(Serialize)]
struct SizeJson {
    schema_version: u32,
    inputs: InputsJson,
    /// Largest probability that a plan does not fit.
    risk: f64,
    smallest: Option<u64>,
    sizes: Vec<SizeRow>,
    interrupted: bool,
}

#[derive(Serialize)]
struct SizeRow {
    gpus: u64,
    best: Option<CandidateJson>,
    tokens_per_s: Option<f64>,
    budget: Option<Budget>,
    pareto: bool,
}

/// Runs `size`.
pub(crate) fn run(args: &SizeArgs) -> Result<ExitCode, CliError> {
    let (resolved, counts) = question(args)?;
    let scenario = &resolved.scenario;
    inputs::risk(args.risk)?;
    let parameters = resolved.json.parameters;
    let training = budget::training(&args.budget, &scenario.cluster, parameters)?;
    note(
        args.output.quiet,
        &format!(
            "global batch {} sequences of {} tokens",
            scenario.workload.global_batch, args.seq
        ),
    );
    let cancelled = search::interrupt_flag();
    let found = sizes(args, scenario, &counts, &training, &cancelled)?;
    let stopped = cancelled.load(Ordering::Relaxed);
    let smallest = found.iter().find(|s| s.best.is_some()).map(|s| s.gpus);
    let rows = rows(&training, scenario, &found);
    if args.output.json {
        output::json(&SizeJson {
            schema_version: SCHEMA_VERSION,
            inputs: resolved.json,
            risk: args.risk,
            smallest,
            sizes: rows,
            interrupted: stopped,
        })?;
    } else {
        conclude(&rows, smallest);
        next::print(&steps(&resolved, smallest)?, args.output);
    }
    Ok(match (stopped, smallest) {
        (true, _) => ExitCode::from(code::INTERRUPTED),
        (false, Some(_)) => ExitCode::SUCCESS,
        (false, None) => ExitCode::from(code::DOES_NOT_FIT),
    })
}

/// The job on the largest number of GPUs, and the numbers to try.
fn question(args: &SizeArgs) -> Result<(Inputs, Vec<u64>), CliError> {
    let cluster_arg = answers::inputs::cluster_arg(args.cluster.as_deref(), None)?;
    let cluster = catalog::load::cluster(&cluster_arg)?;
    if cluster.pools.is_some() {
        let wrong = Mistake::new("size asks how many GPUs of one kind are needed");
        let wrong = wrong.at(format!("--cluster '{cluster_arg}'"));
        return Err(CliError::Input(wrong.expected(
            "a cluster whose nodes are all alike; `search` plans for several pools",
        )));
    }
    let counts = if args.gpus.is_empty() {
        usual_counts(cluster.gpus_per_node, DEFAULT_MOST)
    } else {
        args.gpus.clone()
    };
    for &gpus in &counts {
        answers::inputs::check_gpus(gpus, &cluster)?;
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let global_batch = (args.global_batch).unwrap_or_else(|| batch(&counts, args.seq));
    let resolved = inputs::resolve(&ScenarioArgs {
        model: Some(args.model.clone()),
        cluster: Some(cluster_arg),
        gpus: Some(Gpus::Count(most)),
        runtime: args.runtime.clone(),
        seq: args.seq,
        global_batch: Some(global_batch),
        precision: args.precision,
        headroom: args.headroom,
        documents: args.documents.clone(),
        trained: args.trained,
        jitter: args.jitter,
    })?;
    Ok((resolved, counts))
}

/// Sizes every number of GPUs, and prints each as it is found; stops early when cancelled.
fn sizes(
    args: &SizeArgs,
    scenario: &Scenario,
    counts: &[u64],
    training: &Training,
    cancelled: &AtomicBool,
) -> Result<Vec<Sized>, CliError> {
    let constraints = inputs::constraints(&args.constraints)?;
    planner::legal_values::check(scenario, counts, &constraints)?;
    let costs = CostModel::new(scenario.clone())?;
    let options = SearchOptions {
        risk: Some(args.risk),
        cancelled: Some(cancelled),
        ..SearchOptions::default()
    };
    let progress = Progress::new(args.output.quiet || args.output.json, "sizing");
    let mut found = Vec::with_capacity(counts.len());
    for (done, &gpus) in counts.iter().enumerate() {
        progress.update(done as f64 / counts.len() as f64);
        let sized = sized(&costs, &constraints, gpus, &options)?;
        if cancelled.load(Ordering::Relaxed) {
            break;
        }
        if !args.output.json {
            if found.is_empty() {
                progress.beside(|| output::print(&line(HEADER.map(str::to_owned))));
            }
            let row = row(training, scenario, &sized);
            progress.beside(|| output::print(&shown(&row)));
        }
        found.push(sized);
    }
    progress.finish();
    Ok(found)
}

/// The global batch when none is given: the default of the largest number of GPUs, made a multiple of what is odd in all.
fn batch(counts: &[u64], seq: u64) -> u64 {
    let odd = |gpus: u64| gpus >> gpus.trailing_zeros();
    let all = counts.iter().fold(1, |all, &gpus| lcm(all, odd(gpus)));
    let most = counts.iter().copied().max().unwrap_or(1);
    answers::inputs::default_batch(most / odd(most) * all.min(MOST_ODD), seq)
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// Commands to suggest for the smallest number of GPUs that fits; none if no number fits.
fn steps(resolved: &Inputs, smallest: Option<u64>) -> Result<Vec<Step>, CliError> {
    let Some(gpus) = smallest else {
        return Ok(Vec::new());
    };
    let mut chosen = resolved.clone();
    let workload = resolved.scenario.workload.with_gpus(gpus);
    chosen.scenario.workload = workload.map_err(PlannerError::from)?;
    let search = format!("vescale-plan search {}", launch::flags(&chosen));
    Ok(vec![("plan the smallest in full", vec![search])])
}

/// The row of one number of GPUs; whether it is on the Pareto front is known when all are.
fn row(training: &Training, scenario: &Scenario, sized: &Sized) -> SizeRow {
    let best = sized.best.as_ref();
    let rate = best.map(|best| best.prediction.tokens_per_s_per_gpu);
    let (runtime, precision) = (&scenario.runtime, scenario.workload.precision);
    SizeRow {
        gpus: sized.gpus,
        best: best.map(|best| CandidateJson::new(best, runtime, precision)),
        tokens_per_s: rate.map(|rate| rate * sized.gpus as f64),
        budget: best.and_then(|best| {
            let rate = best.prediction.tokens_per_s_per_gpu;
            training.budget(scenario, sized.gpus, &best.strategy, rate)
        }),
        pareto: false,
    }
}

fn rows(training: &Training, scenario: &Scenario, found: &[Sized]) -> Vec<SizeRow> {
    let of = |sized| row(training, scenario, sized);
    let mut rows: Vec<SizeRow> = found.iter().map(of).collect();
    // A size is on the frontier if no other is both faster and cheaper per token.
    for index in 0..rows.len() {
        let Some((rate, per_gpu)) = speed(&rows[index]) else {
            continue;
        };
        rows[index].pareto = !rows.iter().filter_map(speed).any(|(other, other_per_gpu)| {
            other >= rate && other_per_gpu >= per_gpu && (other > rate || other_per_gpu > per_gpu)
        });
    }
    rows
}

/// Tokens that are kept per second: of all GPUs, and of one.
fn speed(row: &SizeRow) -> Option<(f64, f64)> {
    let failures = row.budget.and_then(|budget| budget.failures);
    let goodput = failures.map_or(1.0, |lost| lost.goodput);
    let kept = row.tokens_per_s? * goodput;
    Some((kept, kept / row.gpus as f64))
}

/// Titles of the columns, and their widths; the plan stands below.
const HEADER: [&str; 6] = ["GPUs", "tokens/s", "MFU", "fits", "days", "cost"];
const WIDTHS: [usize; 6] = [8, 10, 8, 7, 9, 10];

fn line(cells: [String; 6]) -> String {
    let cells = cells.into_iter().zip(WIDTHS);
    let line: String = cells
        .map(|(cell, width)| format!("{cell:<width$}"))
        .collect();
    format!("{}\n", line.trim_end())
}

fn shown(row: &SizeRow) -> String {
    let gpus = row.gpus.to_string();
    let Some(best) = &row.best else {
        return format!("{gpus:<8}does not fit\n");
    };
    let (days, dollars) = row.budget.map_or((String::new(), String::new()), |b| {
        let dollars = b.dollars.map_or_else(String::new, format::dollars);
        let days = match b.days.is_finite() {
            true => format::significant(b.days),
            false => "never".to_owned(),
        };
        (days, dollars)
    });
    let chance = best.predicted.p_fits;
    let figures = line([
        gpus,
        format::short_count(row.tokens_per_s.unwrap_or(0.0)),
        of(best.predicted.mfu),
        chance.map_or_else(String::new, |p| format!("{p:.2}")),
        days,
        dollars,
    ]);
    let below = |text: &str| output::style().paragraph("        ", text);
    let done = row.budget.filter(|budget| budget.days.is_finite());
    let failures = done.and_then(|budget| budget.failures).map(|lost| {
        let every = format::duration(Seconds(lost.checkpoint_every_s));
        below(&format!(
            "goodput {}; a checkpoint every {every}",
            of(lost.goodput)
        ))
    });
    figures + &below(&best.summary) + &failures.unwrap_or_default()
}

/// What follows from all rows.
fn conclude(rows: &[SizeRow], smallest: Option<u64>) {
    let Some(smallest) = smallest else {
        output::print("\nNothing fits at these sizes.\n");
        return;
    };
    let front = rows.iter().filter(|row| row.pareto);
    let front: Vec<String> = front.map(|row| row.gpus.to_string()).collect();
    output::print(&format!(
        "\nNo other is both faster and cheaper: {} GPUs\nSmallest that fits: {smallest} GPU{}\n",
        front.join(", "),
        if smallest == 1 { "" } else { "s" }
    ));
}
