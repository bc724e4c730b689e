//! `search`: the best plan.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use costmodel::CostModel;
use planner::{Objective, PlannerError, SearchOptions, SearchSpace};
use plans::json::{CandidateJson, DetailJson};
use plans::prediction::SpaceReport;
use plans::{Candidate, SearchOutcome};
use serde::Serialize;

use crate::args::{ObjectiveArg, SearchArgs};
use crate::commands::plan;
use crate::commands::report::{self, ReportSource};
use crate::error::{CliError, code};
use crate::inputs::{self, Budget, Inputs, InputsJson};
use crate::output::{self, Progress, SCHEMA_VERSION, note};

#[derive(Serialize)]
struct SearchJson {
    schema_version: u32,
    inputs: InputsJson,
    best: Option<CandidateJson>,
    detail: Option<DetailJson>,
    top: Vec<CandidateJson>,
    space: SpaceReport,
    relax: Vec<String>,
    budget: Option<Budget>,
    interrupted: bool,
    elapsed_s: f64,
    plan_path: Option<String>,
    report_path: Option<String>,
}

/// Runs `search`.
pub(crate) fn run(args: &SearchArgs) -> Result<ExitCode, CliError> {
    let started = Instant::now();
    let resolved = inputs::resolve(&args.scenario)?;
    let scenario = &resolved.scenario;
    let constraints = inputs::constraints(&args.constraints, scenario, &[scenario.workload.gpus])?;
    if args.top == 0 || args.top > 1000 {
        return inputs::usage(format!("--top {}: expected 1 to 1000", args.top));
    }
    inputs::training(&args.budget, &resolved.scenario.cluster)?;
    echo(args, &resolved);
    let costs = CostModel::new(resolved.scenario.clone())?;
    let cancelled = interrupt_flag();
    let progress = Progress::new(args.output.quiet || args.output.json, "searching");
    let outcome = pool(args.threads)?.install(|| {
        let space = SearchSpace::new(&resolved.scenario, &constraints);
        let options = SearchOptions {
            objective: match args.objective {
                ObjectiveArg::Time | ObjectiveArg::Cost => Objective::Time,
                ObjectiveArg::Memory => Objective::Memory,
            },
            top: args.top,
            exhaustive: args.exhaustive,
            cancelled: Some(&cancelled),
        };
        let progress = |share| progress.update(share);
        let mut outcome = planner::search(&costs, &space, &options, &progress)?;
        if outcome.top.is_empty() && !outcome.interrupted {
            outcome.relax = planner::size::relaxations(&resolved.scenario, &constraints)?;
        }
        Ok::<_, PlannerError>(outcome)
    })?;
    progress.finish();
    let elapsed_s = started.elapsed().as_secs_f64();
    finish(args, &resolved, &costs, outcome, elapsed_s)
}

fn finish(
    args: &SearchArgs,
    resolved: &Inputs,
    costs: &CostModel,
    outcome: SearchOutcome,
    elapsed_s: f64,
) -> Result<ExitCode, CliError> {
    let training = inputs::training(&args.budget, &resolved.scenario.cluster)?;
    let budget = outcome
        .top
        .first()
        .and_then(|best| training.budget(resolved.json.gpus, best.prediction.tokens_per_s_per_gpu));
    let paths = match outcome.top.first() {
        Some(best) => Some(write_files(args, resolved, costs, &outcome, best, budget)?),
        None => None,
    };
    if args.output.json {
        let candidate = |c| CandidateJson::new(c, resolved.scenario.workload.precision);
        output::json(&SearchJson {
            schema_version: SCHEMA_VERSION,
            inputs: resolved.json.clone(),
            best: outcome.top.first().map(candidate),
            detail: outcome.top.first().map(|c| DetailJson::from(&c.prediction)),
            top: outcome.top.iter().map(candidate).collect(),
            space: outcome.space.clone(),
            relax: outcome.relax.clone(),
            budget,
            interrupted: outcome.interrupted,
            elapsed_s,
            plan_path: paths.as_ref().map(|p| p.0.display().to_string()),
            report_path: paths.as_ref().map(|p| p.1.display().to_string()),
        })?;
    } else {
        let capacity = costs.capacity();
        output::print(&reports::terminal::search(
            &outcome,
            capacity,
            output::colour(),
        ));
        if let Some(budget) = budget {
            output::print(&super::estimate::budget_line(&budget));
        }
        output::print(&format!("\n{elapsed_s:.2} s\n"));
        if let Some((plan, report)) = &paths {
            note(args.output.quiet, &format!("plan   {}", plan.display()));
            note(args.output.quiet, &format!("report {}", report.display()));
        }
    }
    Ok(if outcome.interrupted {
        ExitCode::from(code::INTERRUPTED)
    } else if outcome.top.is_empty() {
        ExitCode::from(code::DOES_NOT_FIT)
    } else {
        ExitCode::SUCCESS
    })
}

fn write_files(
    args: &SearchArgs,
    resolved: &Inputs,
    costs: &CostModel,
    outcome: &SearchOutcome,
    best: &Candidate,
    budget: Option<Budget>,
) -> Result<(PathBuf, PathBuf), CliError> {
    let stem = format!("{}-{}gpus", resolved.json.model, resolved.json.gpus);
    let plan_path = args
        .output_plan
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("{stem}.plan.yaml")));
    let report_path = args
        .report
        .clone()
        .unwrap_or_else(|| plan::derived(&plan_path, "report.html"));
    let file = plan::file(resolved, &best.strategy, &best.prediction)?;
    let timeline = costs.timeline(&best.strategy)?;
    let html = report::html(&ReportSource {
        inputs: &resolved.json,
        scenario: &resolved.scenario,
        plan: &file,
        best,
        top: &outcome.top,
        space: Some(&outcome.space),
        timeline: &timeline,
        budget,
    });
    output::write(&plan_path, &file.to_yaml()?)?;
    if let Err(error) = output::write(&report_path, &html) {
        // Both or none: a plan without the report that was asked for is half an answer.
        let _ = std::fs::remove_file(&plan_path);
        return Err(error);
    }
    Ok((plan_path, report_path))
}

/// Inputs as rows for people.
pub(crate) fn input_rows(json: &InputsJson) -> Vec<(String, String)> {
    let mut rows = vec![
        (
            "model".into(),
            format!(
                "{} ({:.2} B parameters)",
                json.model,
                json.parameters as f64 / 1e9
            ),
        ),
        ("cluster".into(), json.cluster.clone()),
        ("GPUs".into(), json.gpus.to_string()),
        ("runtime".into(), json.runtime.clone()),
        ("sequence".into(), format!("{} tokens", json.seq_len)),
        (
            "global batch".into(),
            format!("{} sequences", json.global_batch),
        ),
        (
            "precision".into(),
            format!("{:?}", json.precision).to_lowercase(),
        ),
        (
            "memory headroom".into(),
            format!("{:.0}%", json.headroom * 100.0),
        ),
    ];
    if let Some(profile) = &json.profile {
        rows.insert(2, ("profile".into(), profile.clone()));
    }
    rows
}

fn echo(args: &SearchArgs, resolved: &Inputs) {
    let rows: Vec<String> = input_rows(&resolved.json)
        .into_iter()
        .map(|(k, v)| format!("{k} {v}"))
        .collect();
    note(args.output.quiet, &rows.join(" · "));
}

/// A flag that Ctrl-C sets.
fn interrupt_flag() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    // Without a handler Ctrl-C simply ends the program.
    let _ = ctrlc::set_handler(move || set.store(true, Ordering::Relaxed));
    flag
}

fn pool(threads: Option<usize>) -> Result<rayon::ThreadPool, CliError> {
    let threads = match threads {
        Some(n) if n == 0 || n > 1024 => {
            return inputs::usage(format!("--threads {n}: expected 1 to 1024"));
        }
        other => other.unwrap_or(0),
    };
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| CliError::Usage(format!("cannot start threads: {e}")))
}
