//! Megatron-LM: `[time] iteration 10/ 500 | … | elapsed time per iteration (ms): 1234.5 | …`
//! (`megatron/training/training.py`, `training_log`).

use super::line::Line;
use super::log::{LogError, LoggedStep};

/// The label by which a line of a step is known.
pub(super) const ELAPSED: &str = "elapsed time per iteration (ms):";

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    if !line.text.contains(ELAPSED) {
        return Ok(None);
    }
    let ms = line.number(ELAPSED, "elapsed time per iteration (ms)")?;
    let step = line.number(" iteration ", "iteration")?.unwrap_or(0.0);
    let tflops = line.number("throughput per GPU (TFLOP/s/GPU):", "throughput per GPU")?;
    let batch = line.number("global batch size:", "global batch size")?;
    Ok(Some(LoggedStep {
        step: step as u64,
        line: line.number,
        seconds: ms.map(|ms| ms / 1e3),
        tflops_per_gpu: tflops,
        global_batch: batch.map(|b| b as u64),
        ..LoggedStep::default()
    }))
}
