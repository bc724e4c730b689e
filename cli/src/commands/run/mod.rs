//! `run`: trains under a plan and compares measurement with prediction.

mod break_at;
mod comparison;
mod mpi;
mod narrator;
mod processes;
mod ranks;
mod resume;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use answers::InputsJson;
use answers::Opened;
use answers::SCHEMA_VERSION;
use catalog::files::Kind;
use catalog::{Bytes, Documents, Mistake, Packing};
use costmodel::Scenario;
use cpu_device::Numerics;
use cpu_device::{Watch, WatchError};
use dtensor::train::StatesPlan;
use executor::checkpoint::{HubWeights, RunIdentity, Source};
use executor::{AdamW, Checkpoints, Dataset, Execution, Job, Outcome, Session, Settings};
use plans::plan_file::TrainFile;
use serde::Serialize;

use break_at::BreakAt;
use comparison::{Comparison, Predicted};
use narrator::{Log, Narrator};

use crate::args::{ExecutionArg, NumericsArg, RunArgs};
use crate::commands::device;
use crate::commands::plan;
use crate::destinations::{self, Target};
use crate::error::CliError;
use crate::inputs;
use crate::output;

#[derive(Serialize)]
struct RunJson {
    schema_version: u32,
    inputs: InputsJson,
    plan_id: String,
    strategy_text: String,
    numerics: NumericsArg,
    seed: u64,
    ranks: usize,
    first_step: u64,
    losses: Vec<LossJson>,
    gradient_norms: Vec<f64>,
    weights_sha256: String,
    #[serde(flatten)]
    comparison: Comparison,
}

#[derive(Serialize)]
struct LossJson {
    step: u64,
    loss: f64,
    bits: String,
}

/// Runs `run`.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, CliError> {
    crate::memory::keep();
    let loaded = plan::load(&args.plan)?;
    device::check(args, loaded.strategy.world())?;
    let job = job(args, &args.plan, &loaded)?;
    let files = Files::check(args)?;
    let predicted = comparison::predict(args, &loaded)?;
    let narrator = Narrator::new(
        args.output.quiet,
        (job.settings.steps, job.global_batch * job.seq_len),
        predicted.times.as_ref().map(|t| t.at_peak),
        Log::check(args)?,
    );
    let resumed = resume::checkpoint(args, &job)?;
    let first = resumed.as_ref().map_or(0, |c| c.manifest.step);
    let hub = args.init.as_deref().map(HubWeights::open).transpose()?;
    let start = match (&resumed, &hub) {
        (Some(checkpoint), _) => Some((checkpoint as &dyn Source, first)),
        (None, Some(weights)) => Some((weights as &dyn Source, 0)),
        (None, None) => None,
    };
    let dir = args.checkpoints.as_deref();
    let checkpoints = dir.map(|dir| Checkpoints::of(&job, dir, args.every));
    let breaks = args.break_at.as_deref().map(BreakAt::new);
    let session = Session {
        job: &job,
        start,
        checkpoints: checkpoints.as_ref(),
        observer: &narrator,
        watch: breaks.as_ref().map(|b| b as &(dyn Watch + Sync)),
    };
    let trained = match &args.replan_at {
        Some(words) => replanned(args, &session, words),
        None => {
            match ranks::train(args, &session) {
                Ok(Some(outcome)) => Ok((outcome, job.clone(), predicted)),
                // Rank 0 reports the outcome.
                Ok(None) => return Ok(ExitCode::SUCCESS),
                Err(error) => Err(of_plan(&args.plan, error)),
            }
        }
    };
    if let Some(breaks) = breaks {
        return stopped(breaks, trained.map(drop));
    }
    finish(args, loaded, &files, trained?, first)
}

/// An error of training, with the plan as its place if the executor cannot run that plan.
fn of_plan(plan: &Path, error: impl Into<CliError>) -> CliError {
    match error.into() {
        CliError::Executor(error) if error.is_of_plan() => {
            let wrong = Mistake::of_sentence(&error.to_string());
            wrong.at(plan.display().to_string()).into()
        }
        other => other,
    }
}

/// Reports the outcome of training beside the prediction.
fn finish(
    args: &RunArgs,
    loaded: Opened,
    files: &Files,
    (outcome, job, predicted): (Outcome, Job, Predicted),
    first: u64,
) -> Result<ExitCode, CliError> {
    let comparison = Comparison::new(&job, &outcome, &predicted)?;
    // If a file cannot be written, the answer is still printed.
    let saved = files.write(
        &comparison.page(&job, &outcome, &predicted),
        &outcome,
        &predicted,
    );
    if args.output.json {
        output::json(&RunJson {
            schema_version: SCHEMA_VERSION,
            inputs: loaded.inputs,
            plan_id: loaded.file.id,
            strategy_text: job.strategy.to_string(),
            numerics: args.numerics,
            seed: job.settings.seed,
            ranks: outcome.ranks.len(),
            first_step: first,
            losses: losses(&outcome, first),
            gradient_norms: outcome.gradient_norms.clone(),
            weights_sha256: outcome.weights_sha256(),
            comparison,
        })?;
    } else {
        output::print(&comparison.text(&job, &outcome));
    }
    saved?;
    Ok(ExitCode::SUCCESS)
}

/// The report of `--break-at`, unless training failed before.
fn stopped(breaks: BreakAt, trained: Result<(), CliError>) -> Result<ExitCode, CliError> {
    let broke = |error: &executor::ExecutorError| {
        matches!(error.watched(), Some(WatchError::Stopped { .. }))
    };
    match trained {
        Err(CliError::Executor(error)) if broke(&error) => {}
        other => other?,
    }
    output::print(&breaks.report()?);
    Ok(ExitCode::SUCCESS)
}

/// Files to write beside the answer, checked before training.
struct Files {
    /// Timeline of the last step as measured, and the predicted one in a file beside it.
    traces: Option<[Target; 2]>,
    report: Option<Target>,
}

impl Files {
    fn check(args: &RunArgs) -> Result<Self, CliError> {
        let trace = |path: &Path| Target::named(path, Kind::Trace, args.force);
        // Beside `a.json`, as measured, `a.predicted.json`.
        let trace_path = args.trace.as_deref();
        let predicted = trace_path.map(|path| path.with_extension("predicted.json"));
        destinations::distinct(&[
            ("--trace", args.trace.as_deref()),
            ("--trace, of the prediction,", predicted.as_deref()),
            ("--report", args.report.as_deref()),
            ("--log", args.log.as_deref()),
        ])?;
        let traces = args.trace.as_deref().zip(predicted.as_deref());
        let traces = traces
            .map(|(measured, predicted)| Ok::<_, CliError>([trace(measured)?, trace(predicted)?]));
        Ok(Self {
            traces: traces.transpose()?,
            report: Target::optional(args.report.as_ref(), Kind::Report, args.force)?,
        })
    }

    fn write(&self, page: &str, outcome: &Outcome, predicted: &Predicted) -> Result<(), CliError> {
        if let Some([measured_at, predicted_at]) = &self.traces {
            let text =
                |timeline: &plans::Timeline| format!("{}\n", reports::perfetto::trace(timeline));
            measured_at.write(&text(&outcome.timeline()))?;
            if let Some(times) = &predicted.times {
                predicted_at.write(&text(&times.timeline))?;
            }
        }
        if let Some(to) = &self.report {
            to.write(page)?;
        }
        Ok(())
    }
}

/// Trains under the session's plan up to a step, then under another plan.
fn replanned(
    args: &RunArgs,
    session: &Session<'_>,
    words: &[String],
) -> Result<(Outcome, Job, Predicted), CliError> {
    let at = replan_step(session, &words[0])?;
    let path = Path::new(&words[1]);
    let other = plan::load(path)?;
    let job_after = job(args, path, &other)?;
    same_run(args, session.job, &job_after, path)?;
    let predicted_after = comparison::predict(args, &other)?;
    let job_before = Job {
        stop_after: Some(at),
        ..session.job.clone()
    };
    let session_before = Session {
        job: &job_before,
        ..*session
    };
    let before =
        ranks::threads(args, &session_before).map_err(|error| of_plan(&args.plan, error))?;
    output::note(
        args.output.quiet,
        &format!(
            "step {at:>6}  resharded to {}",
            plans::grammar::short(&job_after.strategy)
        ),
    );
    let dir = args.checkpoints.as_deref();
    let checkpoints = dir.map(|dir| Checkpoints::of(&job_after, dir, args.every));
    let session_after = Session {
        job: &job_after,
        checkpoints: checkpoints.as_ref(),
        start: Some((&before.states, at)),
        ..*session
    };
    let mut after = ranks::threads(args, &session_after).map_err(|error| of_plan(path, error))?;
    for (all, more) in [
        (&mut after.losses, before.losses),
        (&mut after.gradient_norms, before.gradient_norms),
        (&mut after.step_times, before.step_times),
    ] {
        all.splice(0..0, more);
    }
    Ok((after, job_after, predicted_after))
}

/// The step of `--replan-at`: one that is still to be trained, and not the first.
fn replan_step(session: &Session<'_>, word: &str) -> Result<u64, CliError> {
    let last = session.job.settings.steps.saturating_sub(1);
    let resumed = session.start.map_or(0, |(_, step)| step);
    let first = resumed.max(1);
    let at = word.parse().ok().filter(|at| (first..=last).contains(at));
    at.map_or_else(
        || {
            let seen = match resumed {
                0 => String::new(),
                steps => format!(": the checkpoint has seen {steps}"),
            };
            let expected = match first <= last {
                true => format!("a step from {first} to {last}{seen}"),
                false => format!("a run that trains at least 2 steps (--steps){seen}"),
            };
            inputs::refuse("--replan-at", word, &expected)
        },
        Ok,
    )
}

/// Refuses to go on under a plan that trains something else than the plan before.
fn same_run(args: &RunArgs, before: &Job, after: &Job, path: &Path) -> Result<(), CliError> {
    let different: Vec<String> = RunIdentity::differences(before, after)
        .iter()
        .map(|[what, before, after]| format!("{what} is {before} before and {after} after"))
        .collect();
    if different.is_empty() {
        return Ok(());
    }
    let what = format!("the plan is of another run: {}", different.join("; "));
    let expected = format!("a plan of the run of {}", args.plan.display());
    Err(CliError::unexpected(path.display(), what, expected))
}

fn losses(outcome: &Outcome, first: u64) -> Vec<LossJson> {
    (first..)
        .zip(&outcome.losses)
        .map(|(step, &loss)| LossJson {
            step,
            loss,
            bits: format!("{:016x}", loss.to_bits()),
        })
        .collect()
}

/// The file to train on: that of the flag, else that of the plan.
fn data(args: &RunArgs, plan: &Path, train: Option<&TrainFile>) -> Result<PathBuf, CliError> {
    match (&args.data, train) {
        (Some(path), _) => Ok(path.clone()),
        (None, Some(train)) => Ok(catalog::files::beside(plan, &train.data).into()),
        (None, None) => {
            let what = "the plan does not say what to train on: it has no `train` section";
            Err(CliError::unexpected(plan.display(), what, "--data FILE"))
        }
    }
}

/// The job that a plan and flags describe.
fn job(args: &RunArgs, plan: &Path, loaded: &Opened) -> Result<Job, CliError> {
    let scenario = loaded.costs.scenario();
    let train = loaded.file.train.as_ref();
    let data = data(args, plan, train)?;
    let steps = args.steps.or(train.map(|t| t.steps)).unwrap_or(10);
    if steps == 0 {
        return inputs::refuse("--steps", steps, "at least 1");
    }
    whole_sequences(plan, scenario)?;
    let runtime = device::runtime(args)?;
    plans::support::allowed_by(
        &loaded.strategy,
        &scenario.model,
        &runtime,
        scenario.workload.precision,
    )?;
    let settings = Settings {
        seed: args.seed.or(train.map(|t| t.seed)).unwrap_or(1234),
        steps,
        numerics: match args.numerics {
            NumericsArg::Exact => Numerics::Exact,
            NumericsArg::Fast => Numerics::Fast,
        },
        execution: match args.execution {
            ExecutionArg::Replayed => Execution::Replayed,
            ExecutionArg::Eager => Execution::Eager,
            ExecutionArg::Graph => Execution::Graph,
        },
        dropout_by_rank: false,
        gradient_bucket: train.map_or(StatesPlan::BUCKET, |train| {
            Bytes(train.gradient_bucket_mib.saturating_mul(1 << 20))
        }),
        optimizer: train.map_or_else(AdamW::default, optimizer),
        timeout: Duration::from_secs(args.timeout),
    };
    let data = Dataset::read(&data, scenario.model.vocab, scenario.workload.seq_len)?;
    let job = Job::new(
        scenario.model.clone(),
        loaded.strategy.clone(),
        &scenario.workload,
        data,
        settings,
    );
    job.map_err(|error| of_plan(plan, error))
}

/// Refuses plans whose tokens attend to less than their whole sequence.
fn whole_sequences(plan: &Path, scenario: &Scenario) -> Result<(), CliError> {
    let documents = scenario.workload.documents().map(Documents::packing);
    let Some(packing @ (Packing::Within | Packing::Padded)) = documents else {
        return Ok(());
    };
    let what = format!("packing: {packing}; our own executor attends to whole sequences of tokens");
    let expected = "a plan that was made with --packing across";
    Err(CliError::unexpected(plan.display(), what, expected))
}

fn optimizer(train: &TrainFile) -> AdamW {
    AdamW {
        learning_rate: train.learning_rate,
        min_learning_rate: train.min_learning_rate(),
        warmup_steps: train.warmup_steps,
        beta1: train.betas[0],
        beta2: train.betas[1],
        weight_decay: train.weight_decay,
        clip_norm: train.clip_norm,
        ..AdamW::default()
    }
}
