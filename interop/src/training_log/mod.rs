//! Training logs of Megatron-LM, torchtitan and nanotron: step times, throughput and memory, as the
//! systems print them.

mod megatron;
mod nanotron;
mod titan;

/// Which system wrote a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogSystem {
    /// Megatron-LM, also under NeMo and Megatron Bridge.
    Megatron,
    /// torchtitan.
    Torchtitan,
    /// nanotron.
    Nanotron,
}

/// What one logged step says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoggedStep {
    /// Step number.
    pub step: u64,
    /// Line in the log, from 1.
    pub line: usize,
    /// Seconds per optimizer step.
    pub seconds: Option<f64>,
    /// Tokens per second and device.
    pub tokens_per_s_per_gpu: Option<f64>,
    /// Model TFLOP/s per device, as the system counts them.
    pub tflops_per_gpu: Option<f64>,
    /// Sequences per step, where the system logs sequences.
    pub global_batch: Option<u64>,
    /// Peak memory that the allocator has reserved, bytes.
    pub reserved: Option<u64>,
}

/// A log, read.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingLog {
    /// Who wrote it.
    pub system: LogSystem,
    /// Steps in the log's order.
    pub steps: Vec<LoggedStep>,
    /// Largest peak of allocated memory that it reports, bytes.
    pub allocated: Option<u64>,
    /// Largest peak of reserved memory that it reports, bytes.
    pub reserved: Option<u64>,
    /// Allocation retries that it reports.
    pub retries: u64,
}

/// Why a log is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// No line is a training step.
    #[error(
        "{path}: no training step is found; lines of Megatron-LM (`iteration … elapsed time per iteration (ms): …`), \
         torchtitan (`step: … tps: …`) and nanotron (`iteration: … tokens_per_sec_per_gpu: …`) are read"
    )]
    NoSteps {
        /// File.
        path: String,
    },
    /// A step line holds a number that is none.
    #[error("{path}:{line}: `{field}`: `{found}` is not a number")]
    Number {
        /// File.
        path: String,
        /// Line.
        line: usize,
        /// Which number.
        field: &'static str,
        /// What stands there.
        found: String,
    },
    /// Too few steps are left after the warm-up.
    #[error(
        "{path}: {steps} steps are logged, and {warmup} are warm-up; give a longer log or a smaller --warmup"
    )]
    TooFew {
        /// File.
        path: String,
        /// Logged.
        steps: usize,
        /// Skipped.
        warmup: usize,
    },
}

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

/// A line without terminal colours.
struct Line<'a> {
    text: &'a str,
    number: usize,
    path: &'a str,
}

impl<'a> Line<'a> {
    /// The word after a label.
    fn after(&self, label: &str) -> Option<&'a str> {
        let (_, rest) = self.text.split_once(label)?;
        let end = |c: char| c.is_whitespace() || c == '|' || c == '(' || c == '/';
        let word = rest.trim_start().split(end).next()?;
        (!word.is_empty()).then_some(word)
    }

    /// The number after a label; `1,234`, `10.7K`, `30.5GiB` and `41.7%` are numbers.
    fn number(&self, label: &str, field: &'static str) -> Result<Option<f64>, LogError> {
        let Some(word) = self.after(label) else {
            return Ok(None);
        };
        match quantity(word) {
            Some(number) => Ok(Some(number)),
            None => Err(LogError::Number {
                path: self.path.to_owned(),
                line: self.number,
                field,
                found: word.chars().take(40).collect(),
            }),
        }
    }
}

/// Largest number that any step logs: far above tokens, milliseconds and bytes of every run, and small enough
/// that sums of them stay finite.
const MOST: f64 = 1e18;

/// Slowest that a step counts as a step, in tokens per second and device: slower, and its time has no end.
const LEAST_RATE: f64 = 1e-6;

/// A number with thousands separators and a unit.
fn quantity(word: &str) -> Option<f64> {
    let word = word.trim_end_matches([',', '.', ';', '|']).replace(',', "");
    let end = word.find(|c: char| c.is_ascii_alphabetic() && c != 'e' && c != 'E' || c == '%');
    let (digits, unit) = word.split_at(end.unwrap_or(word.len()));
    let scale = match unit {
        "" | "%" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "B" => 1e9,
        "T" => 1e12,
        "MiB" | "MB" => 1024f64.powi(2),
        "GiB" => 1024f64.powi(3),
        _ => return None,
    };
    let number = digits.parse::<f64>().ok()? * scale;
    (0.0..=MOST).contains(&number).then_some(number)
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

/// torchtitan colours its lines.
fn without_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' && chars.next_if_eq(&'[').is_some() {
            while chars.next().is_some_and(|c| !c.is_ascii_alphabetic()) {}
        } else {
            plain.push(c);
        }
    }
    plain
}

/// Step times after the warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Steady {
    /// Steps skipped.
    pub warmup: usize,
    /// Seconds of each step kept, ascending.
    pub seconds: Vec<f64>,
}

impl TrainingLog {
    /// Step times after `warmup` logged steps; by default a tenth of them, at least two where there
    /// are more than four. Where a log has throughput only, `tokens_per_step_per_gpu` turns it into
    /// time.
    ///
    /// # Errors
    /// When nothing is left.
    pub fn steady(
        &self,
        path: &str,
        warmup: Option<usize>,
        tokens_per_step_per_gpu: f64,
    ) -> Result<Steady, LogError> {
        let count = self.steps.len();
        let usual = if count > 4 {
            (count / 10).max(2)
        } else {
            count / 2
        };
        let warmup = warmup.unwrap_or(usual);
        let time = |s: &LoggedStep| {
            let by_tokens = s.tokens_per_s_per_gpu.filter(|&t| t >= LEAST_RATE);
            s.seconds.or(by_tokens.map(|t| tokens_per_step_per_gpu / t))
        };
        let mut seconds: Vec<f64> = self.steps.iter().skip(warmup).filter_map(time).collect();
        seconds.retain(|s| *s > 0.0);
        if seconds.is_empty() {
            return Err(LogError::TooFew {
                path: path.to_owned(),
                steps: count,
                warmup,
            });
        }
        seconds.sort_by(f64::total_cmp);
        Ok(Steady { warmup, seconds })
    }
}

impl Steady {
    /// The value below which a share of the steps lies.
    #[must_use]
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.seconds.len() - 1;
        let at = share.clamp(0.0, 1.0) * last as f64;
        let (low, high) = (
            self.seconds[at.floor() as usize],
            self.seconds[at.ceil() as usize],
        );
        low + (high - low) * at.fract()
    }

    /// The middle step.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The mean step: what the whole run takes.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len() as f64
    }

    /// Steps that took more than half again the median.
    #[must_use]
    pub fn slow(&self) -> usize {
        let limit = 1.5 * self.median();
        self.seconds.iter().filter(|s| **s > limit).count()
    }
}
