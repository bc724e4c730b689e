//! `diagnose --follow`: reads a log while the job writes it, and warns when the run drifts from its prediction.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use accuracy::drift::{self, Change, Watch};
use accuracy::logged_run::{self, AtBatch};
use answers::{Opened, SCHEMA_VERSION};
use catalog::Seconds;
use interop::training_log::{self, LogError, StepSize};
use plans::Prediction;
use serde::Serialize;

use crate::args::DiagnoseArgs;
use crate::commands::plan;
use crate::error::CliError;
use crate::output;

/// Time between two readings of the log.
const PAUSE: Duration = Duration::from_millis(500);

/// Number of first steps left out as warm-up unless `--warmup` is given.
const WARMUP: usize = 2;

/// One line for each new reading of the log.
#[derive(Serialize)]
struct SeenJson {
    schema_version: u32,
    step: u64,
    /// Median of the last [`drift::WINDOW`] steps, in seconds.
    step_time_s: f64,
    predicted_step_time_s: f64,
    /// 80% interval of the predicted step time.
    step_time_interval_s: [f64; 2],
    /// Whether the median lies within that interval.
    inside: bool,
}

/// Follows a log until no step has come for `--idle` seconds.
pub(crate) fn run(args: &DiagnoseArgs) -> Result<ExitCode, CliError> {
    let plan = plan::of_log(&args.plan)?;
    let size = logged_run::step_size(&plan);
    let mut job = Job::of(&plan, size.sequences)?;
    let mut before = Vec::new();
    let mut last_new = Instant::now();
    loop {
        let (batch, seen) = times(args, size)?;
        // A log that was emptied, as by a job that starts anew, is followed from its beginning.
        if seen != before {
            last_new = Instant::now();
            if batch != job.batch {
                job = Job::of(&plan, batch)?;
                job.say(args, size.sequences);
            }
            job.see(args, &seen)?;
            before = seen;
        }
        let waited = last_new.elapsed().as_secs_f64();
        if args.idle.is_some_and(|idle| waited >= idle) {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(PAUSE);
    }
}

/// The plan's job at the global batch of the log's steps.
struct Job {
    batch: u64,
    /// `None` if the plan's strategy cannot run that batch.
    watched: Option<(Prediction, Watch)>,
}

impl Job {
    fn of(plan: &Opened, batch: u64) -> Result<Self, CliError> {
        let job = AtBatch::of(plan, batch)?;
        let watched = job.map(|job| {
            let predicted = job.costs.predict(&job.strategy)?;
            let watch = Watch::new(predicted.step_time_interval);
            Ok::<_, CliError>((predicted, watch))
        });
        Ok(Self {
            batch,
            watched: watched.transpose()?,
        })
    }

    /// Says that steps have another batch than those before.
    fn say(&self, args: &DiagnoseArgs, planned: u64) {
        let batch = self.batch;
        if batch == planned {
            let note = format!("note: steps have the plan's {planned} sequences now");
            return output::note(args.format.quiet, &note);
        }
        let then = match self.watched {
            Some(_) => format!("they are compared with a predicted step of {batch}"),
            None => format!("its strategy cannot run {batch}, so that they are not compared"),
        };
        output::warning(&format!(
            "the log has {batch} sequences per step, the plan {planned}: {then}"
        ));
    }

    /// Compares the last steps, given by number and seconds, with the prediction.
    fn see(&mut self, args: &DiagnoseArgs, steps: &[(u64, f64)]) -> Result<(), CliError> {
        let Some((predicted, watch)) = &mut self.watched else {
            return Ok(());
        };
        let seconds: Vec<f64> = steps.iter().map(|(_, seconds)| *seconds).collect();
        let change = watch.see(&seconds);
        if let (Some(median), Some((step, _))) = (drift::recent_median(&seconds), steps.last()) {
            show(args, predicted, *step, median, watch.outside())?;
        }
        warn(change, predicted);
        Ok(())
    }
}

/// The steps' global batch, and number and seconds of each step after the warm-up; none while the log holds no step.
fn times(args: &DiagnoseArgs, size: StepSize) -> Result<(u64, Vec<(u64, f64)>), CliError> {
    let text = catalog::text::read(&args.log)?;
    let shown = args.log.display().to_string();
    match training_log::parse(&text, &shown) {
        Ok(log) => {
            let times = log.times(size).into_iter();
            let times = times.skip(args.warmup.unwrap_or(WARMUP)).collect();
            let batch = log.batch(size.sequences).unwrap_or(size.sequences);
            Ok((batch, times))
        }
        // A job that has not begun yet, or a first line that is half written.
        Err(LogError::NoSteps { .. } | LogError::Number { .. } | LogError::Json { .. }) => {
            Ok((size.sequences, Vec::new()))
        }
        Err(error) => Err(error.into()),
    }
}

fn show(
    args: &DiagnoseArgs,
    p: &Prediction,
    step: u64,
    median: f64,
    outside: bool,
) -> Result<(), CliError> {
    let (low, high) = p.step_time_interval;
    if args.format.json {
        let seen = serde_json::to_string(&SeenJson {
            schema_version: SCHEMA_VERSION,
            step,
            step_time_s: median,
            predicted_step_time_s: p.step_time.0,
            step_time_interval_s: [low.0, high.0],
            inside: !outside,
        });
        let line =
            seen.map_err(|e| CliError::wrong("stdout", format!("cannot write JSON: {e}")))?;
        output::document(&format!("{line}\n"));
        return Ok(());
    }
    output::print(&format!(
        "step {step}: {} a step (median of {}), predicted {} ({low} to {high})\n",
        Seconds(median),
        drift::WINDOW,
        p.step_time,
    ));
    Ok(())
}

fn warn(change: Option<Change>, predicted: &Prediction) {
    let (low, high) = predicted.step_time_interval;
    let text = match change {
        None => return,
        Some(Change::Left(median)) => format!(
            "drift: a step takes {median}, outside of the predicted {low} to {high}; `diagnose` without --follow says \
             where the gap may lie"
        ),
        Some(Change::Returned(median)) => {
            format!("no drift any more: a step takes {median}, within {low} to {high}")
        }
    };
    output::warning(&text);
}
