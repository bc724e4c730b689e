//! `size`: finds how many GPUs to use.

use std::process::ExitCode;

use costmodel::{CostModel, Scenario};
use planner::size::{Sized, sized, usual_counts};
use planner::{PlannerError, SearchOptions};
use plans::json::CandidateJson;
use reports::{format, lines::of};
use serde::Serialize;

use crate::args::values::Gpus;
use crate::args::{ScenarioArgs, SizeArgs};
use crate::commands::next::{self, Step};
use crate::error::{CliError, code};
use crate::inputs::{self, Budget, Inputs, InputsJson, Training};
use crate::output::{self, Progress, SCHEMA_VERSION, note};

/// Largest number of GPUs that is tried when none are given.
const DEFAULT_MOST: u64 = 2048;

#[derive(Serialize)]
struct SizeJson {
    schema_version: u32,
    inputs: InputsJson,
    smallest: Option<u64>,
    sizes: Vec<SizeRow>,
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
    let cluster_arg = inputs::cluster_arg(args.cluster.as_deref(), None)?;
    let cluster = catalog::load::cluster(&cluster_arg)?;
    let counts = if args.gpus.is_empty() {
        usual_counts(cluster.gpus_per_node, DEFAULT_MOST)
    } else {
        args.gpus.clone()
    };
    for &gpus in &counts {
        inputs::check_gpus(gpus, &cluster)?;
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let resolved = inputs::resolve(&ScenarioArgs {
        model: args.model.clone(),
        cluster: Some(cluster_arg),
        gpus: Gpus::Count(most),
        runtime: args.runtime.clone(),
        seq: args.seq,
        global_batch: args.global_batch,
        precision: args.precision,
        headroom: args.headroom,
    })?;
    let scenario = &resolved.scenario;
    let training = inputs::training(&args.budget, &scenario.cluster);
    let constraints = inputs::constraints(&args.constraints, scenario, &counts)?;
    note(
        args.output.quiet,
        &format!(
            "global batch {} sequences of {} tokens",
            scenario.workload.global_batch, args.seq
        ),
    );
    let costs = CostModel::new(scenario.clone())?;
    let progress = Progress::new(args.output.quiet || args.output.json, "sizing");
    let mut found = Vec::with_capacity(counts.len());
    for (done, &gpus) in counts.iter().enumerate() {
        progress.update(done as f64 / counts.len() as f64);
        found.push(sized(
            &costs,
            &constraints,
            gpus,
            &SearchOptions::default(),
        )?);
    }
    progress.finish();
    let smallest = found.iter().find(|s| s.best.is_some()).map(|s| s.gpus);
    let rows = rows(&training, scenario, &found);
    if args.output.json {
        output::json(&SizeJson {
            schema_version: SCHEMA_VERSION,
            inputs: resolved.json,
            smallest,
            sizes: rows,
        })?;
    } else {
        print(&rows, smallest);
        next::print(&steps(&resolved, smallest)?, args.output);
    }
    Ok(if smallest.is_some() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(code::DOES_NOT_FIT)
    })
}

/// What to do with the smallest number of GPUs that fits.
fn steps(resolved: &Inputs, smallest: Option<u64>) -> Result<Vec<Step>, CliError> {
    let Some(gpus) = smallest else {
        return Ok(Vec::new());
    };
    let mut chosen = resolved.clone();
    chosen.scenario.workload = resolved
        .scenario
        .workload
        .on(gpus)
        .map_err(PlannerError::from)?;
    let search = format!("vescale-plan search {}", next::flags(&chosen));
    Ok(vec![("plan the smallest in full", vec![search])])
}

fn rows(training: &Training, scenario: &Scenario, found: &[Sized]) -> Vec<SizeRow> {
    let mut rows = Vec::with_capacity(found.len());
    for sized in found {
        let rate = sized
            .best
            .as_ref()
            .map(|b| b.prediction.tokens_per_s_per_gpu);
        let budget = rate.and_then(|rate| training.budget(sized.gpus, rate));
        rows.push(SizeRow {
            gpus: sized.gpus,
            best: sized
                .best
                .as_ref()
                .map(|c| CandidateJson::new(c, scenario.workload.precision)),
            tokens_per_s: rate.map(|r| r * sized.gpus as f64),
            budget,
            pareto: false,
        });
    }
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

fn speed(row: &SizeRow) -> Option<(f64, f64)> {
    row.tokens_per_s.map(|rate| (rate, rate / row.gpus as f64))
}

fn print(rows: &[SizeRow], smallest: Option<u64>) {
    let mut table: Vec<Vec<String>> = Vec::new();
    for row in rows {
        let Some(best) = &row.best else {
            table.push(vec![
                row.gpus.to_string(),
                "does not fit".into(),
                String::new(),
                String::new(),
                String::new(),
                String::new(),
            ]);
            continue;
        };
        let (days, dollars) = row.budget.map_or((String::new(), String::new()), |b| {
            (
                format::significant(b.days),
                b.dollars.map_or_else(String::new, format::dollars),
            )
        });
        table.push(vec![
            row.gpus.to_string(),
            format!(
                "{} tokens/s",
                format::short_count(row.tokens_per_s.unwrap_or(0.0))
            ),
            of(best.predicted.mfu),
            days,
            dollars,
            format!("{}{}", if row.pareto { "* " } else { "  " }, best.summary),
        ]);
    }
    output::print(&output::style().columns(
        &[
            "GPUs",
            "rate",
            "MFU",
            "days",
            "cost",
            "plan (* on the Pareto front of speed and cost)",
        ],
        &table,
    ));
    match smallest {
        Some(1) => output::print("\nSmallest that fits: 1 GPU\n"),
        Some(gpus) => output::print(&format!("\nSmallest that fits: {gpus} GPUs\n")),
        None => output::print("\nNothing fits at these sizes.\n"),
    }
}
