//! Training logs of Megatron-LM, torchtitan, nanotron, DeepSpeed, NeMo, MaxText, Hugging Face's Trainer and our own
//! executor, and metrics that trackers export: step times, throughput and memory, as the systems print them.

mod formats;
mod hf;
mod line;
mod log;
mod metrics;
mod own;
mod quantity;

use std::collections::{BTreeMap, BTreeSet};

pub use self::log::{LogError, LogSystem, LoggedStep, Steady, StepSize, TrainingLog};

use self::formats::{ELAPSED, FORMATS, Format};
use self::line::{Line, MOST, quantity, without_colour};

/// Number of steps by which another rank's lines may lag.
const LAG: usize = 4;

/// A log that is being read.
struct Reading {
    log: TrainingLog,
    formats: Vec<Format>,
    /// Steps that progress bars have shown. Where output is buffered, each rank's bars come as a whole, one rank's after
    /// the other's.
    bars: BTreeSet<u64>,
    /// How often each rank has logged a step, for lines that begin with their rank.
    of_ranks: BTreeMap<(String, u64), usize>,
    /// How often a step was kept.
    kept: BTreeMap<u64, usize>,
    /// The systems that wrote the kept steps, one for each step.
    of_systems: Vec<LogSystem>,
}

impl Reading {
    fn new(text: &str) -> Self {
        // Megatron-DeepSpeed logs a step in the words of both; Megatron-LM's have its batch and its whole time.
        let megatron = text.contains(ELAPSED);
        let skipped = |of: &Format| megatron && of.system == LogSystem::DeepSpeed;
        let formats = FORMATS.into_iter().filter(|of| !skipped(of));
        Self {
            log: TrainingLog {
                system: LogSystem::Megatron,
                of_others: 0,
                steps: Vec::new(),
                allocated: None,
                reserved: None,
                retries: 0,
                garbled: 0,
                repeated: 0,
                mean_of: None,
            },
            formats: formats.collect(),
            bars: BTreeSet::new(),
            of_ranks: BTreeMap::new(),
            kept: BTreeMap::new(),
            of_systems: Vec::new(),
        }
    }

    fn read(&mut self, line: &Line<'_>) -> Result<(), LogError> {
        let log = &mut self.log;
        let (allocated, reserved) = memory(line);
        log.allocated = log.allocated.max(allocated);
        log.reserved = log.reserved.max(reserved);
        log.retries = log.retries.max(retries(line));
        for format in &self.formats {
            let Some(step) = format.step(line)? else {
                continue;
            };
            let system = format.system;
            self.log.reserved = self.log.reserved.max(step.reserved);
            if self.repeats(line, system, step.step) {
                self.log.repeated += 1;
            } else {
                *self.kept.entry(step.step).or_default() += 1;
                self.log.system = system;
                self.of_systems.push(system);
                self.log.steps.push(step);
            }
            break;
        }
        Ok(())
    }

    /// Whether the step was read already. One read more than [`LAG`] steps ago was run again after
    /// a restart. Where lines name ranks, a step counts as often as its most frequent rank logs it.
    fn repeats(&mut self, line: &Line<'_>, system: LogSystem, step: u64) -> bool {
        let shown = system == LogSystem::Trainer && !self.bars.insert(step);
        let of_rank = line.rank().is_some_and(|rank| {
            let times = self.of_ranks.entry((rank.to_owned(), step)).or_default();
            *times += 1;
            *times <= self.kept.get(&step).copied().unwrap_or(0)
        });
        let mut recent = self.log.steps.iter().rev().take(LAG);
        shown || of_rank || step > 0 && recent.any(|known| known.step == step)
    }
}

/// Reads a log. Garbled lines are left out and counted; a step that several ranks log counts once.
///
/// # Errors
/// When no line is a training step; if all step lines are malformed, the error of the first.
pub fn parse(text: &str, path: &str) -> Result<TrainingLog, LogError> {
    if let Some(log) = metrics::parse(text, path)? {
        return Ok(log);
    }
    let mut reading = Reading::new(text);
    let mut first_error = None;
    let training = hf::training_steps(text);
    for (index, raw) in text.lines().enumerate() {
        // A progress bar returns to the beginning of its line.
        for part in raw.split('\r') {
            if hf::is_other_bar(part, &training) {
                continue;
            }
            let plain = without_colour(part);
            let line = Line {
                text: &plain,
                number: index + 1,
                path,
            };
            if let Err(error) = reading.read(&line) {
                reading.log.garbled += 1;
                first_error.get_or_insert(error);
            }
        }
    }
    let mut log = reading.log;
    let others = reading.of_systems.iter();
    log.of_others = others.filter(|system| **system != log.system).count();
    if log.system == LogSystem::Trainer {
        hf::unsmooth(&mut log.steps);
    }
    from_elapsed(&mut log.steps);
    match (log.steps.is_empty(), first_error) {
        (false, _) => Ok(log),
        (true, Some(error)) => Err(error),
        (true, None) => Err(LogError::NoSteps {
            path: path.to_owned(),
        }),
    }
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
