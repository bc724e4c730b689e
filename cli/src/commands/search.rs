//! `search`: finds the best plan.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use catalog::Seconds;
use catalog::files::Kind;
use costmodel::{CostModel, Score};
use interop::config::escape;
use planner::{Objective, PlannerError, SearchOptions, SearchSpace};
use plans::json::{CandidateJson, DetailJson};
use plans::prediction::SpaceReport;
use plans::{Candidate, SearchOutcome, Strategy};
use reports::format;
use reports::html::nothing::Nothing;
use serde::Serialize;

use crate::args::{ObjectiveArg, SearchArgs};
use crate::commands::next::{self, Launchable, Step};
use crate::commands::next_change;
use crate::commands::plan;
use crate::commands::report::{self, ReportSource};
use crate::destinations::{self, Target};
use crate::error::{CliError, code};
use crate::inputs::{self, Budget, Inputs, InputsJson};
use crate::origins::{self, Asked};
use crate::output::{self, Progress, SCHEMA_VERSION, note};

#[derive(Serialize)]
struct SearchJson {
    schema_version: u32,
    inputs: InputsJson,
    best: Option<CandidateJson>,
    detail: Option<DetailJson>,
    top: Vec<CandidateJson>,
    /// Plans that answer other wishes than the best does.
    wishes: Vec<WishJson>,
    space: SpaceReport,
    relax: Vec<String>,
    /// Largest probability that a plan does not fit.
    risk: f64,
    budget: Option<Budget>,
    interrupted: bool,
    elapsed_s: f64,
    plan_path: Option<String>,
    report_path: Option<String>,
}

/// A plan that answers a wish.
#[derive(Serialize)]
struct WishJson {
    wish: String,
    #[serde(flatten)]
    plan: CandidateJson,
}

/// Number of strategies of the space that are looked at for the report; it draws those that come near to fitting.
const DRAWN: u64 = 8000;

/// Runs `search`.
pub(crate) fn run(args: &SearchArgs, asked: &Asked) -> Result<ExitCode, CliError> {
    let started = Instant::now();
    let resolved = inputs::resolve(&args.scenario)?;
    let scenario = &resolved.scenario;
    let constraints = inputs::constraints(&args.constraints, scenario, &[scenario.workload.gpus])?;
    if args.top == 0 || args.top > 1000 {
        return inputs::refuse("--top", args.top, "1 to 1000");
    }
    inputs::risk(args.risk)?;
    let pool = pool(args.threads)?;
    let files = Files::check(args, &resolved)?;
    echo(args, &resolved);
    let costs = CostModel::new(resolved.scenario.clone())?;
    let cancelled = interrupt_flag();
    let progress = Progress::new(args.output.quiet || args.output.json, "searching");
    let (outcome, sampled) = pool.install(|| {
        let space = SearchSpace::new(&resolved.scenario, &constraints);
        let options = SearchOptions {
            objective: match args.objective {
                ObjectiveArg::Time | ObjectiveArg::Cost => Objective::Time,
                ObjectiveArg::Memory => Objective::Memory,
            },
            top: args.top,
            exhaustive: args.exhaustive,
            tie: None,
            risk: Some(args.risk),
            cancelled: Some(&cancelled),
        };
        let progress = |share| progress.update(share);
        let mut outcome = planner::search(&costs, &space, &options, &progress)?;
        if outcome.top.is_empty() && !outcome.interrupted {
            outcome.relax = planner::size::relaxations(&costs, &constraints, &options)?;
        }
        let sampled = match outcome.top.is_empty() || outcome.interrupted {
            true => Vec::new(),
            false => planner::sample(&costs, &space, DRAWN)?,
        };
        Ok::<_, PlannerError>((outcome, sampled))
    })?;
    progress.finish();
    let elapsed_s = started.elapsed().as_secs_f64();
    let found = Found {
        resolved: &resolved,
        costs: &costs,
        outcome: &outcome,
        sampled: &sampled,
        asked,
    };
    finish(args, &found, &files, elapsed_s)
}

/// The result of a search, with its inputs.
struct Found<'a> {
    resolved: &'a Inputs,
    costs: &'a CostModel,
    outcome: &'a SearchOutcome,
    /// Strategies spread over the space, to be drawn in the report.
    sampled: &'a [(Strategy, Score)],
    asked: &'a Asked,
}

fn finish(
    args: &SearchArgs,
    found: &Found<'_>,
    files: &Files,
    elapsed_s: f64,
) -> Result<ExitCode, CliError> {
    let Found {
        resolved,
        costs,
        outcome,
        ..
    } = found;
    let training = inputs::training(&args.budget, &resolved.scenario.cluster);
    let budget = outcome
        .top
        .first()
        .and_then(|best| training.budget(resolved.json.gpus, best.prediction.tokens_per_s_per_gpu));
    // If files cannot be written, the answer is still printed.
    let saved = match outcome.top.first() {
        Some(best) => files.write(found, best, budget).map(|()| true),
        None if outcome.interrupted => Ok(false),
        None => files.write_nothing(found).map(|()| false),
    };
    let written = matches!(saved, Ok(true));
    let report = match written {
        true => Some(&files.report),
        false => (saved.is_ok() && !outcome.interrupted).then_some(&files.nothing),
    };
    if args.output.json {
        let candidate = |c| CandidateJson::new(c, resolved.scenario.workload.precision);
        output::json(&SearchJson {
            schema_version: SCHEMA_VERSION,
            inputs: resolved.json.clone(),
            best: outcome.top.first().map(candidate),
            detail: outcome.top.first().map(|c| DetailJson::from(&c.prediction)),
            top: outcome.top.iter().map(candidate).collect(),
            wishes: (outcome.wishes.iter())
                .map(|(wish, plan)| WishJson {
                    wish: wish.clone(),
                    plan: candidate(plan),
                })
                .collect(),
            space: outcome.space.clone(),
            relax: outcome.relax.clone(),
            risk: args.risk,
            budget,
            interrupted: outcome.interrupted,
            elapsed_s,
            plan_path: written.then(|| files.plan.text()),
            report_path: report.map(Target::text),
        })?;
    } else {
        let style = output::style();
        let ground = plan::ground(costs);
        output::print(&reports::terminal::search(outcome, ground, style));
        if let Some(budget) = budget {
            output::print(&super::estimate::budget_line(&budget));
        }
        output::print(&format!(
            "\nsearched in {}\n",
            format::seconds(Seconds(elapsed_s))
        ));
        if written {
            files.plan.say(args.output.quiet, "plan  ");
        }
        if let Some(report) = report {
            report.say(args.output.quiet, "report");
        }
        next::print(&steps(found, files, written), args.output);
    }
    saved?;
    Ok(exit_code(outcome))
}

/// Commands to suggest after the search: launch, explain and compare the plan, or find how many GPUs would fit.
fn steps(found: &Found<'_>, files: &Files, written: bool) -> Vec<Step> {
    let mut top = found.outcome.top.iter().map(|c| &c.strategy);
    if let Some(strategy) = top.next().filter(|_| written) {
        let of = Launchable {
            scenario: &found.resolved.scenario,
            strategy,
            plan: &files.plan.text(),
        };
        return next::after_plan(found.resolved, of, top.next());
    }
    let steps = without_plan(found.resolved).into_iter();
    steps
        .map(|(purpose, command)| (purpose, vec![command]))
        .collect()
}

fn exit_code(outcome: &SearchOutcome) -> ExitCode {
    if outcome.interrupted {
        ExitCode::from(code::INTERRUPTED)
    } else if outcome.top.is_empty() {
        ExitCode::from(code::DOES_NOT_FIT)
    } else {
        ExitCode::SUCCESS
    }
}

/// Words by which the report of a search without a plan is recognised, so that such a report may replace another.
const NOTHING_FITS: &str = "No plan fits";

/// Where the plan and its report will be written.
struct Files {
    plan: Target,
    report: Target,
    /// The report that is written instead if nothing fits.
    nothing: Target,
}

impl Files {
    /// Checked before the search, so that its answer is not lost for lack of a writable place.
    fn check(args: &SearchArgs, resolved: &Inputs) -> Result<Self, CliError> {
        let json = &resolved.json;
        let gpus = format!("{}gpus", json.gpus);
        let stem = destinations::stem(&[&json.model, &gpus, &json.cluster, &json.runtime]);
        let chosen = PathBuf::from(format!("{stem}.plan.yaml"));
        let plan = match &args.output_plan {
            Some(path) => Target::named(path, Kind::Plan, args.force)?,
            None => Target::chosen(&chosen, Kind::Plan, args.force)?,
        };
        let beside = plan::derived(plan.path(), "report.html");
        let report = match (&args.report, &args.output_plan) {
            (Some(path), _) => Target::named(path, Kind::Report, args.force)?,
            (None, Some(_)) => Target::named(&beside, Kind::Report, args.force)?,
            (None, None) => Target::chosen(&beside, Kind::Report, args.force)?,
        };
        let instead = plan::derived(plan.path(), "nothing-fits.html");
        let nothing = match &args.report {
            Some(path) => Target::named(path, Kind::Report, args.force)?,
            None => Target::chosen(&instead, Kind::Report, args.force)?,
        };
        Ok(Self {
            plan,
            report,
            nothing,
        })
    }

    /// Writes both files or neither: a plan without the report that was asked for is half an answer.
    fn write(
        &self,
        found: &Found<'_>,
        best: &Candidate,
        budget: Option<Budget>,
    ) -> Result<(), CliError> {
        let Found {
            resolved,
            costs,
            outcome,
            sampled,
            asked,
        } = found;
        let file = plan::file(resolved, &best.strategy, &best.prediction)?;
        let timeline = costs.timeline(&best.strategy)?;
        let html = report::html(&ReportSource {
            inputs: origins::rows(&resolved.json, asked),
            model: &resolved.json.model,
            model_arg: &resolved.model_arg,
            cluster_arg: &resolved.cluster_arg,
            scenario: &resolved.scenario,
            plan: &file,
            best,
            top: &outcome.top,
            sampled,
            space: Some(&outcome.space),
            timeline: &timeline,
            budget,
            plan_path: &self.plan.text(),
            keep: None,
            next_change: next_change::best(costs, &best.strategy, &best.prediction, &[])?,
        });
        let plan = self.plan.of_plan(&file.id, &file.to_yaml()?)?;
        let report = self.report.of_plan(&file.id, &html)?;
        report.commit()?;
        plan.commit()?;
        Ok(())
    }
}

impl Files {
    /// Writes the report of a search in which nothing fits.
    fn write_nothing(&self, found: &Found<'_>) -> Result<(), CliError> {
        let resolved = found.resolved;
        let json = &resolved.json;
        let flags = next::flags(resolved);
        let command = format!("vescale-plan search {flags}");
        let html = reports::html::nothing::report(&Nothing {
            model: &json.model,
            devices: &format!("{} × {}", json.gpus, resolved.scenario.cluster.device.name),
            relax: &found.outcome.relax,
            next: &without_plan(resolved),
            space: &found.outcome.space,
            inputs: &report::facts(&origins::rows(json, found.asked)),
            command: &command,
            version: env!("CARGO_PKG_VERSION"),
        });
        // The page of another search without a plan may be replaced.
        self.nothing.of_plan(NOTHING_FITS, &html)?.commit()?;
        Ok(())
    }
}

/// Commands to try where nothing fits, each with its purpose.
fn without_plan(resolved: &Inputs) -> Vec<(&'static str, String)> {
    let model = escape::shell(&resolved.model_arg);
    let cluster = escape::shell(&resolved.cluster_arg);
    vec![(
        "find the number of GPUs that fits",
        format!("vescale-plan size --model {model} --cluster {cluster}"),
    )]
}

fn echo(args: &SearchArgs, resolved: &Inputs) {
    let rows: Vec<String> = origins::rows(&resolved.json, &Asked::default())
        .into_iter()
        .map(|row| format!("{} {}", row.name, row.value))
        .collect();
    note(args.output.quiet, &rows.join(" · "));
}

/// A flag that is set on Ctrl-C.
pub(crate) fn interrupt_flag() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    // If the handler cannot be set, Ctrl-C simply ends the program.
    let _ = ctrlc::set_handler(move || set.store(true, Ordering::Relaxed));
    flag
}

fn pool(threads: Option<usize>) -> Result<rayon::ThreadPool, CliError> {
    let threads = match threads {
        Some(n) if n == 0 || n > 1024 => {
            return inputs::refuse("--threads", n, "1 to 1024");
        }
        other => other.unwrap_or(0),
    };
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| CliError::Usage(format!("cannot start threads: {e}")))
}
