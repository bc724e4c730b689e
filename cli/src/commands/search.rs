//! `search`: finds the best plan.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use answers::arrangements;
use answers::origins::{self, Asked};
use answers::{Found, Inputs, Search, file_names};
use catalog::files::Kind;
use costmodel::CostModel;
use planner::{Constraints, Objective, SearchOptions};
use plans::{Candidate, SearchOutcome};

use crate::args::{ObjectiveArg, SearchArgs};
use crate::budget;
use crate::commands::present::InUse;
use crate::commands::{keep, next, present};
use crate::destinations::{Target, distinct};
use crate::error::{CliError, code};
use crate::inputs;
use crate::output::{self, Progress, note};

/// Runs `search`.
pub(crate) fn run(args: &SearchArgs, asked: &Asked) -> Result<ExitCode, CliError> {
    let started = Instant::now();
    let (resolved, constraints, in_use) = question(args, asked)?;
    let read = in_use.as_ref().map(|in_use| &in_use.read);
    if args.top == 0 || args.top > 1000 {
        return inputs::refuse("--top", args.top, "1 to 1000");
    }
    inputs::risk(args.risk)?;
    let cluster = &resolved.scenario.cluster;
    budget::check(args.objective, &args.budget, cluster)?;
    let training = budget::training(&args.budget, &resolved.scenario)?;
    let pool = pool(args.threads)?;
    let files = Files::check(args, &resolved)?;
    echo(args, &resolved);
    for line in read.into_iter().flat_map(|read| &read.notes) {
        note(args.output.quiet, &format!("note: {line}"));
    }
    let cancelled = interrupt_flag();
    let progress = Progress::new(args.output.quiet || args.output.json, "searching");
    let search = Search {
        constraints: &constraints,
        options: options(args, &cancelled),
        by_cost: matches!(args.objective, ObjectiveArg::Cost),
        in_use: read.map(|read| &read.strategy),
        compared: in_use.as_ref().map(InUse::now),
        progress: &|share| progress.update(share),
    };
    let costs = || CostModel::new(resolved.scenario.clone()).map(Arc::new);
    let answer = pool.install(|| search.find(&resolved, costs))?;
    progress.finish();
    let elapsed_s = started.elapsed().as_secs_f64();
    let found = Found {
        answer: &answer,
        asked,
        read,
        training,
        risk: args.risk,
    };
    finish(args, &found, &files, elapsed_s)
}

fn options<'a>(args: &SearchArgs, cancelled: &'a AtomicBool) -> SearchOptions<'a> {
    SearchOptions {
        objective: match args.objective {
            ObjectiveArg::Time | ObjectiveArg::Cost | ObjectiveArg::TimeToTrain => Objective::Time,
            ObjectiveArg::Memory => Objective::Memory,
        },
        top: args.top,
        exhaustive: args.exhaustive,
        tie: None,
        risk: Some(args.risk),
        fullest: None,
        cancelled: Some(cancelled),
    }
}

/// What is searched for, under which constraints, and the strategy in use if one was given.
fn question(
    args: &SearchArgs,
    asked: &Asked,
) -> Result<(Inputs, Constraints, Option<InUse>), CliError> {
    let (resolved, in_use) = match &args.from {
        Some(from) => {
            let in_use = present::read(from, args, asked)?;
            (in_use.inputs.clone(), Some(in_use))
        }
        None => (inputs::resolve(&args.scenario)?, None),
    };
    let mut constraints = inputs::constraints(&args.constraints)?;
    if let Some(in_use) = &in_use {
        let (kept, strategies) = (&in_use.read.kept, in_use.strategies());
        keep::keep(kept, &strategies, &mut constraints, &resolved.scenario)?;
    }
    arrangements::check(&resolved, &constraints)?;
    Ok((resolved, constraints, in_use))
}

fn finish(
    args: &SearchArgs,
    found: &Found<'_>,
    files: &Files,
    elapsed_s: f64,
) -> Result<ExitCode, CliError> {
    let outcome = &found.answer.outcome;
    // If files cannot be written, the answer is still printed.
    let saved = match found.best() {
        Some(best) => files.write(found, best).map(|()| true),
        None if outcome.interrupted => Ok(false),
        None => files.write_nothing(found).map(|()| false),
    };
    let plan = matches!(saved, Ok(true)).then_some(&files.plan);
    let report = match plan {
        Some(_) => Some(&files.report),
        None => (saved.is_ok() && !outcome.interrupted).then_some(&files.nothing),
    };
    if args.output.json {
        output::json(&found.json(elapsed_s, plan.map(Target::text), report.map(Target::text)))?;
    } else {
        output::print(&found.text(elapsed_s, output::style()));
        for (what, file) in [("plan  ", plan), ("report", report)] {
            if let Some(file) = file {
                file.say(args.output.quiet, what);
            }
        }
        let steps = found.steps(plan.map(Target::text).as_deref());
        next::print(&steps, args.output);
    }
    saved?;
    Ok(exit_code(outcome))
}

fn exit_code(outcome: &SearchOutcome) -> ExitCode {
    match outcome.interrupted {
        true => ExitCode::from(code::INTERRUPTED),
        false => {
            // A high `--risk` also takes a plan that is predicted not to fit.
            let best = outcome.top.first();
            let fits = best.is_some_and(|best| best.prediction.fit.fits());
            code::unless(fits, code::DOES_NOT_FIT)
        }
    }
}

/// Words by which the report of a search without a plan is recognised, so that such a report may replace another.
const NOTHING_FITS: &str = "No plan fits";

/// The comment at the head of the plan file of a search that was interrupted.
const INTERRUPTED: &str =
    "# The search was interrupted: this is the best plan that was found until then.\n";

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
        let chosen = PathBuf::from(file_names::plan(&resolved.json));
        let given = args.output_plan.as_ref();
        let plan = Target::given_or(given, &chosen, Kind::Plan, args.force)?;
        let beside = file_names::derived(plan.path(), file_names::REPORT);
        let named = args.report.as_ref().or(given.map(|_| &beside));
        let report = Target::given_or(named, &beside, Kind::Report, args.force)?;
        let instead = file_names::derived(plan.path(), file_names::NOTHING_FITS);
        let named = args.report.as_ref();
        let nothing = Target::given_or(named, &instead, Kind::Report, args.force)?;
        for page in [&report, &nothing] {
            distinct(&[
                ("the plan (-o)", Some(plan.path())),
                ("its report (--report)", Some(page.path())),
            ])?;
        }
        Ok(Self {
            plan,
            report,
            nothing,
        })
    }

    /// Writes both files or neither: a plan without the report that was asked for is half an answer.
    fn write(&self, found: &Found<'_>, best: &Candidate) -> Result<(), CliError> {
        let file = found.plan(best)?;
        let html = found.report(best, &file, &self.plan.text())?;
        let mut yaml = file.to_yaml()?;
        if found.answer.outcome.interrupted {
            yaml.insert_str(0, INTERRUPTED);
        }
        let plan = self.plan.of_plan(&file.id, &yaml)?;
        let report = self.report.of_plan(&file.id, &html)?;
        report.commit()?;
        plan.commit()?;
        Ok(())
    }

    /// Writes the report of a search in which nothing fits.
    fn write_nothing(&self, found: &Found<'_>) -> Result<(), CliError> {
        // The page of another search without a plan may be replaced.
        let page = self.nothing.of_plan(NOTHING_FITS, &found.nothing())?;
        page.commit()?;
        Ok(())
    }
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
    // If the handler cannot be set, Ctrl-C simply ends the program.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&flag));
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
        .map_err(|e| CliError::wrong("--threads", format!("cannot start threads: {e}")))
}
