//! How each system logs a step on a line of its own.

use super::line::Line;
use super::log::{LogError, LogSystem, LoggedStep};
use super::quantity::Quantity::{
    self, Elapsed, GlobalBatch, Milliseconds, ReservedBytes, Seconds, Sequences, Step, Tflops,
    TokensPerGpu,
};
use super::{hf, own};

/// The lines of a system's steps.
#[derive(Clone, Copy)]
pub(super) struct Format {
    pub(super) system: LogSystem,
    /// Texts that such a line has; what follows a `!` it has not.
    has: &'static [&'static str],
    numbers: Numbers,
}

/// How the numbers of a line are read.
#[derive(Clone, Copy)]
enum Numbers {
    /// Each follows a label.
    Labelled(&'static [(&'static str, Quantity)]),
    /// `None` if the line is no step; an error if it has text where a number belongs.
    By(fn(&Line<'_>) -> Result<Option<LoggedStep>, LogError>),
}

use Numbers::{By, Labelled};

/// The label by which a step of Megatron-LM is known.
pub(super) const ELAPSED: &str = "elapsed time per iteration (ms):";
/// InternEvo's rate.
const TGS: &str = "tgs (tokens/gpu/second)=";
/// The label of a step in PyTorch's FSDP examples; a line without its number is no step.
const BATCH: &str = "Batch ";

pub(super) const FORMATS: [Format; 11] = [
    // `[time] iteration 10/ 500 | … | elapsed time per iteration (ms): 1234.5 | …` (`megatron/training/training.py`,
    // `training_log`).
    Format {
        system: LogSystem::Megatron,
        has: &[ELAPSED],
        numbers: Labelled(&[
            (ELAPSED, Milliseconds),
            (" iteration ", Step),
            ("throughput per GPU (TFLOP/s/GPU):", Tflops),
            ("global batch size:", GlobalBatch),
        ]),
    },
    // `step: 10 loss: … memory: 30.50GiB(38.5%) tps: 7,123 tflops: 412.3 mfu: 41.7%` (`torchtitan/components/metrics.py`; `tps`
    // is per device). `validate step: …` has the same numbers but is not a training step.
    Format {
        system: LogSystem::Torchtitan,
        has: &["step:", "!validate step:", " tps: "],
        numbers: Labelled(&[
            ("memory:", ReservedBytes),
            ("step:", Step),
            (" tps:", TokensPerGpu),
            ("tflops:", Tflops),
        ]),
    },
    // `iteration: 10 / 2000 | consumed_tokens: 1.05M | time_per_iteration_ms: 1.23K | tokens_per_sec_per_gpu: 10.7K | …`
    // (`src/nanotron/trainer.py`, `train_step_logs`).
    Format {
        system: LogSystem::Nanotron,
        has: &["iteration:", "time_per_iteration_ms:"],
        numbers: Labelled(&[
            ("time_per_iteration_ms:", Milliseconds),
            ("iteration:", Step),
            ("tokens_per_sec_per_gpu:", TokensPerGpu),
            ("model_tflops_per_gpu:", Tflops),
        ]),
    },
    // `epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5, MemAllocated=10.5GB,
    // MaxMemAllocated=30.1GB` (`deepspeed/utils/timer.py`; samples of the whole job).
    Format {
        system: LogSystem::DeepSpeed,
        has: &["CurrSamplesPerSec="],
        numbers: Labelled(&[("CurrSamplesPerSec=", Sequences), ("global_step=", Step)]),
    },
    // `Training epoch 0, iteration 45/99 | lr: 6.9e-06 | global_batch_size: 128 | global_step: 45 |
    // max_memory_reserved: 127785762816 | … | train_step_timing in s: 6.08 | TFLOPS_per_GPU: 1.249e+03 | …`.
    Format {
        system: LogSystem::NeMo,
        has: &["train_step_timing in s:"],
        numbers: Labelled(&[
            ("train_step_timing in s:", Seconds),
            ("global_step:", Step),
            ("TFLOPS_per_GPU:", Tflops),
            ("global_batch_size:", GlobalBatch),
            ("max_memory_reserved:", ReservedBytes),
        ]),
    },
    // `completed step: 9, seconds: 3.139, TFLOP/s/device: 419.7, Tokens/s/device: 7831.5, …`.
    Format {
        system: LogSystem::MaxText,
        has: &["completed step:", ", seconds:"],
        numbers: Labelled(&[
            (", seconds:", Seconds),
            ("completed step:", Step),
            ("Tokens/s/device:", TokensPerGpu),
            ("TFLOP/s/device:", Tflops),
        ]),
    },
    Format {
        system: LogSystem::Own,
        has: &[],
        numbers: By(own::step),
    },
    // InternEvo: `step=3 … tgs (tokens/gpu/second)=1031.73`.
    Format {
        system: LogSystem::Research,
        has: &[TGS, " step="],
        numbers: Labelled(&[(" step=", Step), (TGS, TokensPerGpu), ("tflops=", Tflops)]),
    },
    // modded-nanogpt: `step:12/5100 train_loss:… train_time:353ms step_avg:…` (time since the run began).
    Format {
        system: LogSystem::Research,
        has: &["step:", " train_loss:", " train_time:"],
        numbers: Labelled(&[(" train_time:", Elapsed), ("step:", Step)]),
    },
    // PyTorch's FSDP examples: `Batch 3 Loss: …, Speed: 10.61 samples/sec` (of the whole job).
    Format {
        system: LogSystem::Research,
        has: &[" Speed: ", " samples/sec"],
        numbers: Labelled(&[(BATCH, Step), (" Speed: ", Sequences)]),
    },
    Format {
        system: LogSystem::Trainer,
        has: &[],
        numbers: By(hf::step),
    },
];

impl Format {
    /// Reads a line: `None` if it is no step; an error if a step has text where a number belongs.
    pub(super) fn step(&self, line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
        let has = |text: &&str| match text.strip_prefix('!') {
            Some(text) => !line.text.contains(text),
            None => line.text.contains(text),
        };
        if !self.has.iter().all(has) {
            return Ok(None);
        }
        let numbers = match self.numbers {
            Labelled(numbers) => numbers,
            By(read) => return read(line),
        };
        let mut step = LoggedStep {
            line: line.number,
            ..LoggedStep::default()
        };
        for (label, quantity) in numbers {
            match line.number(label)? {
                Some(number) if *quantity == GlobalBatch && number < 1.0 => {
                    let field = label.trim_end_matches(':');
                    return Err(line.not(field, &number.to_string(), "a number above 0"));
                }
                Some(number) => quantity.set(&mut step, number),
                None if *label == BATCH => return Ok(None),
                None => {}
            }
        }
        Ok(Some(step))
    }
}
