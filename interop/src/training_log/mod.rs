//! Training logs of Megatron-LM, torchtitan and nanotron: step times, throughput and memory, as the
//! systems print them.

mod line;
mod log;
mod megatron;
mod nanotron;
mod titan;

pub use self::log::{LogError, LogSystem, LoggedStep, Steady, TrainingLog};

use self::line::{Line, MOST, without_colour};

/// Reads a log.
///
/// # Errors
/// When no line is a training step, or one is malformed.
pub fn parse(text: &str, path: &str) -> Result<TrainingLog, LogError> {
    let mut log = TrainingLog {
        system: LogSystem::Megatron,
        steps: Vec::new(),
        allocated: None,
        reserved: None,
        retries: 0,
    };
    for (index, raw) in text.lines().enumerate() {
        let plain = without_colour(raw);
        let line = Line {
            text: &plain,
            number: index + 1,
            path,
        };
        let found = match (
            megatron::step(&line)?,
            titan::step(&line)?,
            nanotron::step(&line)?,
        ) {
            (Some(step), ..) => Some((LogSystem::Megatron, step)),
            (None, Some(step), _) => Some((LogSystem::Torchtitan, step)),
            (None, None, Some(step)) => Some((LogSystem::Nanotron, step)),
            (None, None, None) => None,
        };
        if let Some((system, step)) = found {
            log.system = system;
            log.reserved = log.reserved.max(step.reserved);
            log.steps.push(step);
        }
        let (allocated, reserved) = memory(&line);
        log.allocated = log.allocated.max(allocated);
        log.reserved = log.reserved.max(reserved);
        log.retries = log.retries.max(titan::retries(&line));
    }
    if log.steps.is_empty() {
        let path = path.to_owned();
        return Err(LogError::NoSteps { path });
    }
    Ok(log)
}

/// Peaks of memory that a line reports: Megatron-LM's and nanotron's reports are in MiB.
fn memory(line: &Line<'_>) -> (Option<u64>, Option<u64>) {
    let mib = |labels: [&str; 3]| {
        let found = labels.iter().find_map(|label| line.after(label));
        let word = found?.trim_end_matches(['M', 'G', 'i', 'B', '.', ',']);
        let number: f64 = word.parse().ok()?;
        (0.0..=MOST / 1024f64.powi(2))
            .contains(&number)
            .then_some((number * 1024f64.powi(2)) as u64)
    };
    let report = line.text.contains("memory (MB)") || line.text.contains("Peak allocated");
    if !report && !line.text.contains("Peak reserved") {
        return (None, None);
    }
    (
        mib(["max allocated:", "Peak allocated:", "Peak allocated "]),
        mib(["max reserved:", "Peak reserved:", "Peak reserved "]),
    )
}
