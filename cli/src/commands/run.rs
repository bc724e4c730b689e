//! `run`: trains under a plan and sets what was measured beside what was predicted.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use costmodel::{CostModel, Held, Scenario};
use dtensor::cpu::Numerics;
use executor::checkpoint::{Checkpoint, HubWeights, Source};
use executor::{
    AdamW, Checkpoints, Dataset, Job, Observer, Outcome, RankReport, Session, Settings,
};
use plans::plan_file::TrainFile;
use serde::Serialize;

use crate::args::{NumericsArg, RunArgs};
use crate::commands::plan::{self, Loaded};
use crate::error::CliError;
use crate::inputs::InputsJson;
use crate::output::{self, SCHEMA_VERSION};

/// The runtime that our executor is.
const RUNTIME: &str = "vescale";

#[derive(Serialize)]
struct RunJson {
    schema_version: u32,
    inputs: InputsJson,
    plan_id: String,
    strategy_text: String,
    numerics: &'static str,
    seed: u64,
    ranks: usize,
    first_step: u64,
    losses: Vec<LossJson>,
    gradient_norms: Vec<f64>,
    weights_sha256: String,
    /// Median of all steps but the first.
    step_time_s: f64,
    tokens_per_s: f64,
    phases: Vec<PhaseJson>,
    memory: Vec<MemoryJson>,
}

#[derive(Serialize)]
struct LossJson {
    step: u64,
    loss: f64,
    bits: String,
}

#[derive(Serialize)]
struct PhaseJson {
    /// Pipeline rank.
    rank: u64,
    phase: String,
    count: usize,
    measured_s: f64,
    /// Absent: this machine has no profile to price kernels with.
    predicted_s: Option<f64>,
}

#[derive(Serialize)]
struct MemoryJson {
    /// Pipeline rank; bytes are those of its heaviest peer.
    rank: u64,
    name: &'static str,
    measured_bytes: u64,
    predicted_bytes: u64,
}

/// Says on stderr how training goes.
struct Narrator {
    quiet: bool,
    steps: u64,
}

impl Observer for Narrator {
    fn step(&self, step: u64, loss: f64) {
        let every = (self.steps / 20).max(1);
        if step.is_multiple_of(every) || step + 1 == self.steps {
            output::note(self.quiet, &format!("step {step:>6}  loss {loss:.4}"));
        }
    }

    fn saved(&self, path: &Path) {
        output::note(self.quiet, &format!("saved {}", path.display()));
    }
}

/// Runs `run`.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, CliError> {
    let loaded = plan::load(&args.plan)?;
    let job = job(args, &loaded)?;
    let held = held(&loaded)?;
    let narrator = Narrator {
        quiet: args.output.quiet,
        steps: job.settings.steps,
    };
    let resumed = resumed(args, &job)?;
    let first = resumed.as_ref().map_or(0, |c| c.manifest.step);
    let hub = match &args.init {
        Some(path) => Some(HubWeights::open(path)?),
        None => None,
    };
    let start = match (&resumed, &hub) {
        (Some(checkpoint), _) => Some((checkpoint as &dyn Source, first)),
        (None, Some(weights)) => Some((weights as &dyn Source, 0)),
        (None, None) => None,
    };
    let checkpoints = args.checkpoints.as_ref().map(|dir| Checkpoints {
        dir: dir.clone(),
        every: args.every,
    });
    let session = Session {
        job: &job,
        start,
        checkpoints: checkpoints.as_ref(),
        observer: &narrator,
    };
    let (outcome, job, held) = match &args.replan_at {
        Some(words) => replanned(args, &session, words)?,
        None => (executor::train(&session)?, job.clone(), held),
    };
    if let Some(path) = &args.trace {
        let trace = reports::perfetto::trace(&outcome.timeline());
        output::write(path, &format!("{trace}\n"))?;
    }
    let memory = memory(&outcome, &held);
    let phases = phases(&outcome);
    let step_time = median(outcome.step_times.get(1..).unwrap_or(&[]))
        .or(outcome.step_times.first().copied())
        .unwrap_or(f64::NAN);
    let tokens = (job.global_batch * job.seq_len) as f64;
    if args.output.json {
        output::json(&RunJson {
            schema_version: SCHEMA_VERSION,
            inputs: loaded.inputs,
            plan_id: loaded.file.id,
            strategy_text: job.strategy.to_string(),
            numerics: numerics_name(args.numerics),
            seed: job.settings.seed,
            ranks: outcome.ranks.len(),
            first_step: first,
            losses: losses(&outcome, first),
            gradient_norms: outcome.gradient_norms.clone(),
            weights_sha256: outcome.weights_sha256(),
            step_time_s: step_time,
            tokens_per_s: tokens / step_time,
            phases,
            memory,
        })?;
    } else {
        output::print(&text(&job, &outcome, step_time, &phases, &memory));
    }
    Ok(ExitCode::SUCCESS)
}

/// The checkpoint to go on from, if one was asked for; it must be of this model and seed.
fn resumed(args: &RunArgs, job: &Job) -> Result<Option<Checkpoint>, CliError> {
    let path = match (&args.resume, &args.checkpoints) {
        (None, _) => return Ok(None),
        (Some(Some(path)), _) | (Some(None), Some(path)) => path,
        (Some(None), None) => {
            let message = "--resume: name a checkpoint, or a folder with --checkpoints";
            return Err(CliError::Usage(message.to_owned()));
        }
    };
    let checkpoint = Checkpoint::open(path)?;
    let manifest = &checkpoint.manifest;
    let wrong = |what: &str, theirs: &str, ours: &str| {
        let folder = checkpoint.folder().display();
        let message = format!("{folder}: is of {what} {theirs}, the plan has {ours}");
        Err(CliError::Usage(message))
    };
    if manifest.model != job.model.name {
        return wrong("model", &manifest.model, &job.model.name);
    }
    if manifest.seed != job.settings.seed {
        let (theirs, ours) = (manifest.seed.to_string(), job.settings.seed.to_string());
        return wrong("seed", &theirs, &ours);
    }
    if manifest.step >= job.settings.steps {
        let message = format!(
            "{}: has seen {} steps already; ask for more than that with --steps",
            checkpoint.folder().display(),
            manifest.step
        );
        return Err(CliError::Usage(message));
    }
    Ok(Some(checkpoint))
}

/// Trains under the session's plan up to a step, then under another.
fn replanned(
    args: &RunArgs,
    session: &Session<'_>,
    words: &[String],
) -> Result<(Outcome, Job, Vec<Held>), CliError> {
    let steps = session.job.settings.steps;
    let at = words[0].parse().ok().filter(|&at| 0 < at && at < steps);
    let Some(at) = at else {
        let message = format!(
            "--replan-at: expected a step between 1 and {}, not {}",
            steps - 1,
            words[0]
        );
        return Err(CliError::Usage(message));
    };
    let other = plan::load(Path::new(&words[1]))?;
    let job_after = job(args, &other)?;
    if job_after.model != session.job.model || job_after.global_batch != session.job.global_batch {
        let message = format!(
            "{}: plans another model or batch than {}",
            words[1],
            args.plan.display()
        );
        return Err(CliError::Usage(message));
    }
    let held_after = held(&other)?;
    let job_before = Job {
        stop_after: Some(at),
        ..session.job.clone()
    };
    let before = executor::train(&Session {
        job: &job_before,
        ..*session
    })?;
    output::note(
        args.output.quiet,
        &format!(
            "step {at:>6}  resharded to {}",
            plans::grammar::short(&job_after.strategy)
        ),
    );
    let mut after = executor::train(&Session {
        job: &job_after,
        start: Some((&before.states, at)),
        ..*session
    })?;
    for (all, more) in [
        (&mut after.losses, before.losses),
        (&mut after.gradient_norms, before.gradient_norms),
        (&mut after.step_times, before.step_times),
    ] {
        all.splice(0..0, more);
    }
    Ok((after, job_after, held_after))
}

fn numerics_name(numerics: NumericsArg) -> &'static str {
    match numerics {
        NumericsArg::Exact => "exact",
        NumericsArg::Fast => "fast",
    }
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

/// The job of a plan and its flags.
fn job(args: &RunArgs, loaded: &Loaded) -> Result<Job, CliError> {
    let scenario = loaded.costs.scenario();
    let train = loaded.file.train.as_ref();
    let data = match (&args.data, train) {
        (Some(path), _) => path.clone(),
        (None, Some(train)) => plan::beside(&args.plan, &train.data).into(),
        (None, None) => {
            return Err(CliError::Usage(format!(
                "{}: the plan has no `train` section; name the data with --data FILE",
                args.plan.display()
            )));
        }
    };
    let steps = args.steps.or(train.map(|t| t.steps)).unwrap_or(10);
    if steps == 0 {
        return Err(CliError::Usage("--steps: expected at least 1".to_owned()));
    }
    let runtime = spec::load::runtime(RUNTIME)?;
    plans::legality::allowed_by(&loaded.strategy, &scenario.model, &runtime)?;
    let settings = Settings {
        seed: args.seed.or(train.map(|t| t.seed)).unwrap_or(1234),
        steps,
        numerics: match args.numerics {
            NumericsArg::Exact => Numerics::Exact,
            NumericsArg::Fast => Numerics::Fast,
        },
        dropout_by_rank: false,
        optimizer: train.map_or_else(AdamW::default, optimizer),
        timeout: Duration::from_secs(args.timeout),
    };
    let data = read_data(&data, scenario)?;
    Ok(Job::new(
        scenario.model.clone(),
        loaded.strategy.clone(),
        &scenario.workload,
        data,
        settings,
    )?)
}

fn read_data(path: &Path, scenario: &Scenario) -> Result<Dataset, CliError> {
    let seq_len = scenario.workload.seq_len;
    Ok(Dataset::read(path, scenario.model.vocab, seq_len)?)
}

fn optimizer(train: &TrainFile) -> AdamW {
    AdamW {
        learning_rate: train.learning_rate,
        min_learning_rate: train.min_learning_rate,
        warmup_steps: train.warmup_steps,
        beta1: train.betas[0],
        beta2: train.betas[1],
        weight_decay: train.weight_decay,
        clip_norm: train.clip_norm,
        ..AdamW::default()
    }
}

/// What the cost model says our executor holds.
fn held(loaded: &Loaded) -> Result<Vec<Held>, CliError> {
    let scenario = Scenario {
        runtime: spec::load::runtime(RUNTIME)?,
        ..loaded.costs.scenario().clone()
    };
    Ok(CostModel::new(scenario)?.held(&loaded.strategy)?)
}

fn memory(outcome: &Outcome, held: &[Held]) -> Vec<MemoryJson> {
    let mut lines = Vec::new();
    for (rank, held) in (0u64..).zip(held) {
        let most = |bytes: fn(&RankReport) -> u64| {
            let peers = outcome.ranks.iter().filter(|r| r.pp == rank);
            peers.map(bytes).max().unwrap_or(0)
        };
        let states = &held.states;
        let named = [
            (
                "parameters",
                most(|r| r.states.parameters),
                states.parameters,
            ),
            ("gradients", most(|r| r.states.gradients), states.gradients),
            (
                "optimizer: master parameters",
                most(|r| r.states.master),
                states.master,
            ),
            (
                "optimizer: moments",
                most(|r| r.states.moments),
                states.moments,
            ),
            ("saved activations", most(|r| r.peak_saved), held.peak_saved),
        ];
        lines.extend(named.map(|(name, measured_bytes, predicted)| MemoryJson {
            rank,
            name,
            measured_bytes,
            predicted_bytes: predicted.0,
        }));
    }
    lines
}

/// Time of every kind of action in the last step, per pipeline rank.
fn phases(outcome: &Outcome) -> Vec<PhaseJson> {
    let mut sums: BTreeMap<(u64, String), (usize, f64)> = BTreeMap::new();
    for event in &outcome.timeline().events {
        let sum = sums
            .entry((u64::from(event.rank), event.name.clone()))
            .or_default();
        sum.0 += 1;
        sum.1 += (event.end - event.start).0;
    }
    sums.into_iter()
        .map(|((rank, phase), (count, measured_s))| PhaseJson {
            rank,
            phase,
            count,
            measured_s,
            predicted_s: None,
        })
        .collect()
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

fn text(
    job: &Job,
    outcome: &Outcome,
    step_time: f64,
    phases: &[PhaseJson],
    memory: &[MemoryJson],
) -> String {
    let last = outcome.losses.last().copied().unwrap_or(f64::NAN);
    let first = outcome.losses.first().copied().unwrap_or(f64::NAN);
    let mut text = format!(
        "{} on {} ranks: {}\n\nloss      {first:.6} → {last:.6} in {} steps\nstep      {:.1} ms, {:.0} tokens/s\nweights   sha256 {}\n\n",
        job.model.name,
        outcome.ranks.len(),
        plans::grammar::short(&job.strategy),
        outcome.losses.len(),
        step_time * 1e3,
        (job.global_batch * job.seq_len) as f64 / step_time,
        outcome.weights_sha256(),
    );
    text.push_str("memory per rank (heaviest peer)          measured      predicted\n");
    for line in memory {
        text.push_str(&format!(
            "  pp{:<3} {:<30} {:>12}   {:>12}{}\n",
            line.rank,
            line.name,
            line.measured_bytes,
            line.predicted_bytes,
            if line.measured_bytes == line.predicted_bytes {
                ""
            } else {
                "   differs"
            }
        ));
    }
    text.push_str("\ntime of the last step, by action\n");
    for phase in phases {
        text.push_str(&format!(
            "  pp{:<3} {:<12} × {:<4} {:>9.3} ms\n",
            phase.rank,
            phase.phase,
            phase.count,
            phase.measured_s * 1e3
        ));
    }
    text
}
