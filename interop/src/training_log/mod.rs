//! Training logs of Megatron-LM, torchtitan, nanotron, DeepSpeed, NeMo, MaxText, Hugging Face's Trainer and our own
//! executor, and metrics that trackers export: step times, throughput and memory, as the systems print them.

mod faults;
mod formats;
mod hf;
mod line;
mod log;
mod metrics;
mod own;
mod quantity;

use std::collections::BTreeMap;

pub use self::log::{LogError, LogSystem, LoggedStep, Steady, StepSize, TrainingLog};

use self::formats::{ELAPSED, FORMATS, Format};
use self::line::{Line, MOST, quantity, without_colour};

/// Number of steps by which another rank's lines may lag.
const LAG: usize = 4;

/// A run with fewer steps counts only where no other in the log has more: it holds little more than start-up.
const FEWEST: usize = 5;

/// The steps of one run, of which a log may hold several, and its peaks of memory.
#[derive(Default)]
struct Run {
    steps: Vec<LoggedStep>,
    /// The systems that wrote the steps, one for each.
    of_systems: Vec<LogSystem>,
    allocated: Option<u64>,
    reserved: Option<u64>,
    retries: u64,
}

impl Run {
    fn note_memory(&mut self, line: &Line<'_>) {
        let (allocated, reserved) = memory(line);
        self.allocated = self.allocated.max(allocated);
        self.reserved = self.reserved.max(reserved);
        self.retries = self.retries.max(retries(line));
    }

    /// Derives the times of steps from what is logged in their place.
    fn timed(mut self) -> Self {
        if self.of_systems.last() == Some(&LogSystem::Trainer) {
            hf::unsmooth(&mut self.steps);
        }
        from_elapsed(&mut self.steps);
        self
    }
}

/// A log that is being read.
struct Reading {
    formats: Vec<Format>,
    /// The runs before the present one.
    earlier: Vec<Run>,
    run: Run,
    repeated: usize,
    /// How often each rank has logged a step, for lines that begin with their rank.
    of_ranks: BTreeMap<(String, u64), usize>,
    /// How often a step was kept.
    kept: BTreeMap<u64, usize>,
}

impl Reading {
    fn new(text: &str, training: &hf::Training) -> Self {
        // Megatron-DeepSpeed logs a step in the words of both, as the Trainer with DeepSpeed does. Megatron-LM's words have its batch and its
        // whole time, and the Trainer's bar tells evaluations from steps.
        let others = text.contains(ELAPSED) || training.losses;
        let skipped = |of: &Format| others && of.system == LogSystem::DeepSpeed;
        let formats = FORMATS.into_iter().filter(|of| !skipped(of));
        Self {
            formats: formats.collect(),
            earlier: Vec::new(),
            run: Run::default(),
            repeated: 0,
            of_ranks: BTreeMap::new(),
            kept: BTreeMap::new(),
        }
    }

    fn read(&mut self, line: &Line<'_>) -> Result<(), LogError> {
        self.run.note_memory(line);
        for format in &self.formats {
            let Some(step) = format.step(line)? else {
                continue;
            };
            let system = format.system;
            if self.repeats(line, step.step) {
                self.repeated += 1;
            } else {
                self.keep(system, step);
            }
            self.run.reserved = self.run.reserved.max(step.reserved);
            break;
        }
        Ok(())
    }

    /// Keeps a step. One with a smaller number than the last begins another run.
    fn keep(&mut self, system: LogSystem, step: LoggedStep) {
        *self.kept.entry(step.step).or_default() += 1;
        let last = self.run.steps.last();
        if last.is_some_and(|last| step.step < last.step) {
            self.earlier.push(std::mem::take(&mut self.run));
        }
        self.run.of_systems.push(system);
        self.run.steps.push(step);
    }

    /// Whether the step was read already. One read more than [`LAG`] steps ago is of another run. Where lines name ranks, a step counts as
    /// often as its most frequent rank logs it.
    fn repeats(&mut self, line: &Line<'_>, step: u64) -> bool {
        let of_rank = line.rank().is_some_and(|rank| {
            let times = self.of_ranks.entry((rank.to_owned(), step)).or_default();
            *times += 1;
            *times <= self.kept.get(&step).copied().unwrap_or(0)
        });
        let mut recent = self.run.steps.iter().rev().take(LAG);
        of_rank || step > 0 && recent.any(|known| known.step == step)
    }

    /// The log of the last run that has more than a few steps, or else of the last one.
    fn finish(self, garbled: usize) -> Option<TrainingLog> {
        let runs = self.earlier.into_iter().chain([self.run]);
        let mut runs: Vec<Run> = runs.map(Run::timed).collect();
        runs.retain(|run| !run.steps.is_empty());
        let long = runs.iter().rposition(|run| run.steps.len() >= FEWEST);
        let counted = long.or(runs.len().checked_sub(1))?;
        let run = runs.remove(counted);
        let system = *run.of_systems.last()?;
        let others = run.of_systems.iter().filter(|of| **of != system);
        Some(TrainingLog {
            system,
            of_others: others.count(),
            other_runs: runs.into_iter().map(|run| run.steps).collect(),
            steps: run.steps,
            allocated: run.allocated,
            reserved: run.reserved,
            retries: run.retries,
            garbled,
            repeated: self.repeated,
            mean_of: None,
        })
    }
}

/// Reads a log. Garbled lines are left out and counted; a step that several ranks log counts once; of several runs the last counts.
///
/// # Errors
/// When no line is a training step; if all step lines are malformed, the error of the first.
pub fn parse(text: &str, path: &str) -> Result<TrainingLog, LogError> {
    if let Some(log) = metrics::parse(text, path)? {
        return Ok(log);
    }
    let training = hf::training(text);
    let mut reading = Reading::new(text, &training);
    let mut garbled = 0;
    let mut first_error = None;
    for (index, raw) in text.lines().enumerate() {
        // A progress bar returns to the beginning of its line.
        for part in raw.split('\r') {
            if training.is_other_bar(part) {
                continue;
            }
            let plain = without_colour(part);
            let line = Line {
                text: &plain,
                number: index + 1,
                path,
            };
            if let Err(error) = reading.read(&line) {
                garbled += 1;
                first_error.get_or_insert(error);
            }
        }
    }
    let log = reading.finish(garbled);
    log.ok_or_else(|| first_error.unwrap_or_else(|| faults::without_steps(text, path)))
}

/// Derives step times from the seconds since the run began. A new clock leaves a step untimed.
fn from_elapsed(steps: &mut [LoggedStep]) {
    for at in (1..steps.len()).rev() {
        let (before, now) = (steps[at - 1], steps[at]);
        let count = now.step.saturating_sub(before.step) as f64;
        let passed = now
            .elapsed
            .zip(before.elapsed)
            .map(|(now, before)| now - before);
        let passed = passed.filter(|s| *s > 0.0 && count > 0.0);
        steps[at].seconds = now.seconds.or(passed.map(|s| s / count));
    }
}

/// Number of retries in torchtitan's warning `12 CUDA memory allocation retries.`
fn retries(line: &Line<'_>) -> u64 {
    let Some((before, _)) = line.text.split_once(" memory allocation retries") else {
        return 0;
    };
    let mut words = before.split_whitespace().rev();
    words.find_map(|word| word.parse().ok()).unwrap_or(0)
}

/// Memory peaks that a line reports. Where no unit follows the number, it is in MiB.
fn memory(line: &Line<'_>) -> (Option<u64>, Option<u64>) {
    let bytes = |labels: [&str; 3]| {
        let found = labels.iter().find_map(|label| line.after(label));
        let word = found?.trim_end_matches(['.', ',']);
        let unit = match word.ends_with(|c: char| c.is_ascii_digit()) {
            true => 1024f64.powi(2),
            false => 1.0,
        };
        let number = quantity(word)? * unit;
        (number <= MOST).then_some(number as u64)
    };
    let report = line.text.contains("memory (MB)") || line.text.contains("Peak allocated");
    if !report && !line.text.contains("Peak reserved") {
        return (None, None);
    }
    (
        bytes(["max allocated:", "Peak allocated:", "Peak allocated "]),
        bytes(["max reserved:", "Peak reserved:", "Peak reserved "]),
    )
}
