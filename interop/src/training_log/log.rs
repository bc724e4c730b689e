//! The content of a training log: its steps, its memory peaks, and step times after the warm-up.

use catalog::Mistake;

use crate::config::place;

/// The system that wrote a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogSystem {
    /// Megatron-LM, also under NeMo and Megatron Bridge.
    Megatron,
    /// torchtitan.
    Torchtitan,
    /// nanotron.
    Nanotron,
    /// DeepSpeed.
    DeepSpeed,
    /// NeMo on Lightning.
    NeMo,
    /// MaxText.
    MaxText,
    /// Hugging Face's Trainer.
    Trainer,
    /// Our own executor.
    Own,
    /// InternEvo, modded-nanogpt or PyTorch's FSDP examples.
    Research,
    /// Metrics exported by Weights & Biases or TensorBoard.
    Metrics,
}

impl LogSystem {
    /// Whether logged TFLOP/s surely count every key of the sequence for every query: those that the causal mask hides, and those beyond a
    /// sliding window. `false` means that a log does not tell:
    /// Megatron-Core 0.8 included it; Megatron-LM (`num_floating_point_operations` in `megatron/training/training.py` at d98e8a6)
    /// and Megatron Bridge (`flop_utils.py`) leave it out.
    #[must_use]
    pub fn counts_all_keys(self) -> bool {
        // torchtitan's `get_nparams_and_flops` (since moved to `torchtitan/models/utils.py`), nanotron's `get_flops`: both have the length of
        // the sequence for each layer.
        matches!(self, Self::Torchtitan | Self::Nanotron)
    }
}

/// The values that one step logs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoggedStep {
    /// Step number.
    pub step: u64,
    /// Line number in the log, from 1.
    pub line: usize,
    /// Seconds per optimizer step.
    pub seconds: Option<f64>,
    /// Seconds since the run began, where the system logs no time of the step itself.
    pub elapsed: Option<f64>,
    /// Tokens per second and device.
    pub tokens_per_s_per_gpu: Option<f64>,
    /// Sequences per second and device.
    pub sequences_per_s_per_gpu: Option<f64>,
    /// Sequences per second of the whole job.
    pub sequences_per_s: Option<f64>,
    /// Model TFLOP/s per device, as the system counts them.
    pub tflops_per_gpu: Option<f64>,
    /// Sequences per step, where the system logs sequences.
    pub global_batch: Option<u64>,
    /// Peak memory that the allocator has reserved, in bytes.
    pub reserved: Option<u64>,
}

/// A training log after parsing.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingLog {
    /// The system that wrote it; of several, the one that wrote the last step.
    pub system: LogSystem,
    /// Number of steps that another system wrote.
    pub of_others: usize,
    /// The steps of the run that counts, in the order of the log.
    pub steps: Vec<LoggedStep>,
    /// The steps of other runs in the same log: step numbers go back where one begins.
    pub other_runs: Vec<Vec<LoggedStep>>,
    /// Largest peak of allocated memory that it reports, in bytes.
    pub allocated: Option<u64>,
    /// Largest peak of reserved memory that it reports, in bytes.
    pub reserved: Option<u64>,
    /// Number of allocation retries that it reports.
    pub retries: u64,
    /// Number of garbled step lines, as when several ranks write at once; they are left out.
    pub garbled: usize,
    /// Number of lines that repeat a step, as when several ranks log it; the first is kept.
    pub repeated: usize,
    /// Number of steps, if the log has only their mean time; evaluations and saves between them are
    /// part of that time.
    pub mean_of: Option<u64>,
}

/// Size of an optimizer step of the plan, which turns a rate into a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSize {
    /// Tokens per step and device.
    pub tokens_per_gpu: f64,
    /// Sequences per step of the whole job.
    pub sequences: u64,
    /// Devices of the job.
    pub gpus: u64,
}

/// What is read as a training step.
const READABLE: &str = "lines of Megatron-LM (`iteration … elapsed time per iteration (ms): …`), \
         torchtitan (`step: … tps: …`), nanotron (`iteration: … tokens_per_sec_per_gpu: …`), DeepSpeed \
         (`CurrSamplesPerSec=…`), NeMo (`train_step_timing in s: …`), MaxText (`completed step: … seconds: …`), Hugging \
         Face's Trainer (`10/100 [… 2.10s/it]`, trainer_state.json), InternEvo (`tgs (tokens/gpu/second)=…`), modded-nanogpt \
         (`train_time:…ms`), PyTorch's FSDP examples (`Speed: … samples/sec`), `run --log`, and CSV or JSON of Weights & \
         Biases and TensorBoard";

/// Why a log could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// No line of the log is a training step.
    #[error("{path}: no training step is found; {READABLE} are read")]
    NoSteps {
        /// Path of the log.
        path: String,
    },
    /// A metric of a step is not a number.
    #[error("{}: `{field}`: `{found}` is not {expected}", place(path, *line))]
    Number {
        /// Path of the log.
        path: String,
        /// Line number, from 1; 0 if it is not known.
        line: usize,
        /// Name of the number.
        field: String,
        /// What is found in its place.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
    /// No training step is found, and the text looks like JSON but cannot be parsed.
    #[error("{}: the JSON is broken at column {column}: {reason}", place(path, *line))]
    Json {
        /// Path of the log.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// Column in the line.
        column: usize,
        /// What the parser says.
        reason: String,
    },
    /// Exported metrics are of several runs.
    #[error("{path}: the metrics are of {} runs, {}; give those of one run", runs.len(), named(runs))]
    SeveralRuns {
        /// Path of the file.
        path: String,
        /// Names of the runs.
        runs: Vec<String>,
    },
    /// The Trainer's state has no time: it was saved with a checkpoint.
    #[error(
        "{path}: the Trainer's state has no `train_runtime`, which it gets when training ends; give the trainer_state.json of the \
         finished run, or the log of its progress bar"
    )]
    Unfinished {
        /// Path of the file.
        path: String,
    },
    /// The Trainer's state has the time since a resume, but not the number of steps since then.
    #[error(
        "{path}: the run was resumed, and the file has its time without the number of steps since then; give the log of its \
         progress bar"
    )]
    Resumed {
        /// Path of the log.
        path: String,
    },
    /// No step is left after the warm-up.
    #[error(
        "{path}: {steps} steps are logged, and none is left after {warmup} of warm-up; give a longer log or a smaller --warmup"
    )]
    TooFew {
        /// Path of the log.
        path: String,
        /// Number of steps logged.
        steps: usize,
        /// Number of steps skipped as warm-up.
        warmup: usize,
    },
    /// No step after the warm-up has a time, or a rate that gives one.
    #[error(
        "{path}: {steps} steps are logged, and none of those after {warmup} of warm-up has a time or rate above 0; give a \
         log of step times or rates"
    )]
    NoTimes {
        /// Path of the log.
        path: String,
        /// Number of steps logged.
        steps: usize,
        /// Number of steps skipped as warm-up.
        warmup: usize,
    },
}

impl LogError {
    /// The error split into what is wrong, where, and what was expected.
    #[must_use]
    pub fn mistake(&self) -> Mistake {
        match self {
            Self::NoSteps { path } => Mistake::new("no training step is found")
                .at(path)
                .expected(READABLE),
            Self::Number {
                path,
                line,
                field,
                found,
                expected,
            } => Mistake::new(format!("`{field}`: `{found}` is not {expected}"))
                .at(place(path, *line))
                .expected(*expected),
            Self::Json {
                path,
                line,
                column,
                reason,
            } => Mistake::new(format!("the JSON is broken at column {column}: {reason}"))
                .at(place(path, *line))
                .expected("JSON that a tracker has written to its end"),
            Self::SeveralRuns { path, runs } => Mistake::new(format!(
                "the metrics are of {} runs, {}",
                runs.len(),
                named(runs)
            ))
            .at(path)
            .expected("metrics of one run"),
            Self::Unfinished { path } => Mistake::new(
                "the Trainer's state has no `train_runtime`, which it gets when training ends",
            )
            .at(path)
            .expected("the trainer_state.json of the finished run, or the log of its progress bar"),
            Self::Resumed { path } => Mistake::new(
                "the run was resumed, and the file has its time without the number of steps since then",
            )
            .at(path)
            .expected("the log of its progress bar"),
            Self::TooFew {
                path,
                steps,
                warmup,
            } => Mistake::new(format!(
                "{steps} steps are logged, and none is left after {warmup} of warm-up"
            ))
            .at(path)
            .expected("a longer log or a smaller --warmup"),
            Self::NoTimes {
                path,
                steps,
                warmup,
            } => Mistake::new(format!(
                "{steps} steps are logged, and none of those after {warmup} of warm-up has a time or rate above 0"
            ))
            .at(path)
            .expected("a log of step times or rates"),
        }
    }
}

/// Largest number of runs that a message names.
const NAMED: usize = 5;

/// Names of runs in words.
fn named(runs: &[String]) -> String {
    let first: Vec<String> = runs
        .iter()
        .take(NAMED)
        .map(|run| format!("`{run}`"))
        .collect();
    let more = if runs.len() > NAMED { ", …" } else { "" };
    first.join(", ") + more
}

/// Lowest rate that counts, in tokens per second and device: below it, a step's time would be unbounded.
const LEAST_RATE: f64 = 1e-6;

/// The steps after the warm-up that have one global batch, or log none.
#[derive(Clone, Debug, PartialEq)]
pub struct Steady {
    /// Number of steps skipped as warm-up.
    pub warmup: usize,
    /// Number of steps after the warm-up that are left out, because they have another global batch.
    pub other_batches: usize,
    /// The remaining steps, in the order of the log.
    pub steps: Vec<LoggedStep>,
    /// Whether the first logged step is the only one of them.
    pub first_alone: bool,
    /// Seconds of the remaining steps, in ascending order.
    pub seconds: Vec<f64>,
}

impl TrainingLog {
    /// The batch of the steps that count: the plan's, or else the last; `None` if the log says none.
    #[must_use]
    pub fn batch(&self, planned: u64) -> Option<u64> {
        batch(&self.steps, planned)
    }

    /// Every step of one batch that has a time, in the order of the log: its number and its seconds. The batch is the plan's, or else
    /// the last.
    #[must_use]
    pub fn times(&self, size: StepSize) -> Vec<(u64, f64)> {
        let steps = of_one_batch(&self.steps, size.sequences);
        let timed = (steps.iter()).filter_map(|step| Some((step.step, size.seconds(step)?)));
        timed.collect()
    }

    /// The usual step time of each other run in the log, in seconds.
    #[must_use]
    pub fn other_medians(&self, size: StepSize) -> Vec<f64> {
        let runs = self.other_runs.iter().map(|steps| Self {
            steps: steps.clone(),
            ..self.clone()
        });
        let steady = runs.filter_map(|run| run.steady("", None, size).ok());
        steady.map(|steady| steady.median()).collect()
    }

    /// The steps after `warmup` logged steps; by default the first tenth is skipped, at least two steps where there are
    /// more than four. Where batches differ, as while a job raises its batch, steps of the plan's batch count, or else
    /// those of the last. Where a log has only throughput, the size of a step turns it into time.
    ///
    /// # Errors
    /// When no step is left.
    pub fn steady(
        &self,
        path: &str,
        warmup: Option<usize>,
        size: StepSize,
    ) -> Result<Steady, LogError> {
        let count = self.steps.len();
        let usual = if count > 4 {
            (count / 10).max(2)
        } else {
            count / 2
        };
        let warmup = warmup.unwrap_or(usual);
        let after = self.steps.get(warmup..).unwrap_or_default();
        let steps = of_one_batch(after, size.sequences);
        let mut seconds: Vec<f64> = steps.iter().filter_map(|step| size.seconds(step)).collect();
        if seconds.is_empty() {
            let path = path.to_owned();
            let steps = count;
            return Err(match after.is_empty() {
                true => LogError::TooFew {
                    path,
                    steps,
                    warmup,
                },
                false => LogError::NoTimes {
                    path,
                    steps,
                    warmup,
                },
            });
        }
        seconds.sort_by(f64::total_cmp);
        Ok(Steady {
            warmup,
            other_batches: after.len() - steps.len(),
            first_alone: self.mean_of.is_none()
                && warmup == 0
                && seconds.len() == 1
                && steps.first() == self.steps.first(),
            steps,
            seconds,
        })
    }
}

/// The planned batch if a step has it, or else the last one.
fn batch(steps: &[LoggedStep], planned: u64) -> Option<u64> {
    let mut logged = steps.iter().rev().filter_map(|step| step.global_batch);
    let last = logged.clone().next();
    logged.find(|batch| *batch == planned).or(last)
}

/// The steps of the planned batch, else of the last one; and steps that log no batch.
fn of_one_batch(steps: &[LoggedStep], planned: u64) -> Vec<LoggedStep> {
    let batch = batch(steps, planned);
    let kept = |step: &&LoggedStep| step.global_batch.is_none() || step.global_batch == batch;
    steps.iter().filter(kept).copied().collect()
}

impl StepSize {
    /// The time of a step: as logged, or from its rate; `None` if the log says neither.
    fn seconds(self, step: &LoggedStep) -> Option<f64> {
        let rate = |rate: Option<f64>| rate.filter(|&r| r >= LEAST_RATE);
        let sequences = step.global_batch.unwrap_or(self.sequences) as f64;
        let tokens = self.tokens_per_gpu * (sequences / self.sequences as f64);
        let by_tokens = rate(step.tokens_per_s_per_gpu).map(|r| tokens / r);
        let by_sequences = rate(step.sequences_per_s).map(|r| sequences / r);
        let of_gpu = rate(step.sequences_per_s_per_gpu);
        let by_gpu = of_gpu.map(|r| sequences / self.gpus as f64 / r);
        let seconds = step.seconds.or(by_tokens).or(by_sequences).or(by_gpu);
        seconds.filter(|s| *s > 0.0)
    }
}

impl Steady {
    /// Sequences of a step, if the log says how many.
    #[must_use]
    pub fn global_batch(&self) -> Option<u64> {
        self.steps.iter().rev().find_map(|step| step.global_batch)
    }

    /// Quantile of the step time, in seconds; `share` is from 0 to 1.
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

    /// The median step time.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// How far the median may be from the true one, in seconds: two standard errors. Quartiles of a normal distribution are 1.349 standard
    /// deviations apart, and its median's standard error is 1.253 deviations over the root of the number of steps.
    #[must_use]
    pub fn median_error(&self) -> f64 {
        let deviation = (self.quantile(0.75) - self.quantile(0.25)) / 1.349;
        2.0 * 1.253 * deviation / (self.seconds.len() as f64).sqrt()
    }

    /// The mean step time, which determines the duration of the whole run.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len() as f64
    }

    /// Number of steps that took more than 1.5 times the median.
    #[must_use]
    pub fn slow(&self) -> usize {
        let limit = 1.5 * self.median();
        self.seconds.iter().filter(|s| **s > limit).count()
    }
}
