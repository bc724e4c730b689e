//! `checkpoint`: shows, verifies or reshards a checkpoint, or exports its weights.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use answers::SCHEMA_VERSION;
use catalog::files::Kind;
use cpu_device::Numerics;
use dtensor::train::StatesPlan;
use executor::checkpoint::{Checkpoint, Manifest, ParameterEntry};
use executor::{AdamW, Checkpoints, Dataset, Execution, Job, Observer, Session, Settings};
use serde::Serialize;

use crate::args::{
    CheckpointAction, CheckpointArgs, CheckpointPath, ExportWeightsArgs, ReshardArgs,
};
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::{CliError, code};
use crate::output;

#[derive(Serialize)]
struct InspectJson<'c> {
    schema_version: u32,
    path: String,
    manifest: &'c Manifest,
    parameters: Vec<ParameterEntry>,
}

#[derive(Serialize)]
struct VerifyJson {
    schema_version: u32,
    path: String,
    /// Steps that it has seen; absent where it cannot be opened.
    step: Option<u64>,
    whole: bool,
    problems: Vec<String>,
}

/// The answer about a file or folder that was made from a checkpoint.
#[derive(Serialize)]
struct MadeJson {
    schema_version: u32,
    /// The file or folder that was written.
    path: String,
    /// The checkpoint that it was made of.
    checkpoint_path: String,
    step: u64,
}

impl MadeJson {
    /// Prints the answer about what was written to `path`.
    fn print(path: &Path, checkpoint: &Checkpoint) -> Result<(), CliError> {
        output::json(&Self {
            schema_version: SCHEMA_VERSION,
            path: path.display().to_string(),
            checkpoint_path: checkpoint.folder().display().to_string(),
            step: checkpoint.manifest.step,
        })
    }
}

/// Runs `checkpoint`.
pub(crate) fn run(args: &CheckpointArgs) -> Result<ExitCode, CliError> {
    match &args.action {
        CheckpointAction::Inspect(args) => inspect(args),
        CheckpointAction::Verify(args) => verify(args),
        CheckpointAction::Reshard(args) => reshard(args),
        CheckpointAction::Export(args) => export(args),
    }
}

fn export(args: &ExportWeightsArgs) -> Result<ExitCode, CliError> {
    let to = Target::named(&args.to, Kind::Weights, args.force)?;
    let checkpoint = Checkpoint::open(&args.path)?;
    to.write(&checkpoint.safetensors()?)?;
    to.say(args.output.quiet, "weights");
    if args.output.json {
        MadeJson::print(to.path(), &checkpoint)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect(args: &CheckpointPath) -> Result<ExitCode, CliError> {
    let checkpoint = Checkpoint::open(&args.path)?;
    let path = checkpoint.folder().display().to_string();
    let parameters = checkpoint.parameters();
    let manifest = &checkpoint.manifest;
    if args.output.json {
        output::json(&InspectJson {
            schema_version: SCHEMA_VERSION,
            path,
            manifest,
            parameters,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let bytes: u64 = manifest.files.iter().map(|f| f.bytes).sum();
    let elements = parameters.iter().map(|p| p.shape.iter().product::<u64>());
    let elements: u64 = elements.sum();
    let run = manifest.run.as_ref().map_or_else(
        || "of a run that it does not describe".to_owned(),
        |run| {
            format!(
                "{} in {}; data {:.12}; {}; learning rate {}",
                run.batch, run.precision, run.data_sha256, run.optimizer, run.learning_rate
            )
        },
    );
    let mut text = format!(
        "{path}\n  model {} after {} steps, seed {}\n  {run}\n  written under {}\n  {} parameters, {elements} elements with both moments, {} in {} files\n\n",
        manifest.model,
        manifest.step,
        manifest.seed,
        manifest.strategy,
        parameters.len(),
        catalog::Bytes(bytes),
        manifest.files.len(),
    );
    for p in &parameters {
        let (name, shape, pieces) = (&p.name, &p.shape, p.files.len());
        text.push_str(&format!("  {name:<60} {shape:?} in {pieces} pieces\n"));
    }
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

fn verify(args: &CheckpointPath) -> Result<ExitCode, CliError> {
    let folder = Checkpoint::locate(&args.path)?;
    let path = folder.display().to_string();
    // What cannot be opened is damaged too.
    let (step, problems) = match Checkpoint::at(folder) {
        Ok(checkpoint) => (Some(checkpoint.manifest.step), checkpoint.verify()),
        Err(problem) => (None, vec![problem]),
    };
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let whole = problems.is_empty();
    if args.output.json {
        output::json(&VerifyJson {
            schema_version: SCHEMA_VERSION,
            path,
            step,
            whole,
            problems,
        })?;
    } else if let (Some(step), true) = (step, whole) {
        output::print(&format!("{path}: whole, step {step}\n"));
    } else {
        output::print(&format!("{}\n", problems.join("\n")));
    }
    Ok(code::unless(whole, code::DAMAGED))
}

/// An observer that reports only what was saved, and remembers its path.
struct Saved {
    quiet: bool,
    path: OnceLock<PathBuf>,
}

impl Observer for Saved {
    fn step(&self, _: &executor::StepReport) {}

    fn saved(&self, path: &Path) {
        output::note(self.quiet, &format!("saved {}", path.display()));
        let _ = self.path.set(path.to_owned());
    }
}

/// Loads under the new plan and saves again, as a training job would without a step.
fn reshard(args: &ReshardArgs) -> Result<ExitCode, CliError> {
    let checkpoint = Checkpoint::open(&args.path)?;
    let loaded = plan::load(&args.plan)?;
    let scenario = loaded.costs.scenario();
    let settings = Settings {
        seed: checkpoint.manifest.seed,
        steps: checkpoint.manifest.step,
        numerics: Numerics::Fast,
        execution: Execution::Replayed,
        dropout_by_rank: false,
        gradient_bucket: StatesPlan::BUCKET,
        optimizer: AdamW::default(),
        timeout: Duration::from_secs(600),
    };
    let job = Job::new(
        scenario.model.clone(),
        loaded.strategy.clone(),
        &scenario.workload,
        Dataset::default(),
        settings,
    )?;
    let checkpoints = Checkpoints {
        dir: args.to.clone(),
        every: 0,
        // It is the same run under another layout.
        run: checkpoint.manifest.run.clone(),
    };
    let saved = Saved {
        quiet: args.output.quiet,
        path: OnceLock::new(),
    };
    executor::train(&Session {
        job: &job,
        start: Some((&checkpoint, checkpoint.manifest.step)),
        checkpoints: Some(&checkpoints),
        observer: &saved,
        watch: None,
    })?;
    if args.output.json {
        let path = saved.path.get().unwrap_or(&checkpoints.dir);
        MadeJson::print(path, &checkpoint)?;
    }
    Ok(ExitCode::SUCCESS)
}
