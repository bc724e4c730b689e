//! NeMo: `Training epoch 0, iteration 45/99 | lr: 6.9e-06 | global_batch_size: 128 | global_step: 45 |
//! max_memory_reserved: 127785762816 | … | train_step_timing in s: 6.08 | TFLOPS_per_GPU: 1.249e+03 | …`.

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    let timing = "train_step_timing in s:";
    if !line.text.contains(timing) {
        return Ok(None);
    }
    let seconds = line.number(timing, "train_step_timing in s")?;
    let step = line.number("global_step:", "global_step")?;
    let tflops = line.number("TFLOPS_per_GPU:", "TFLOPS_per_GPU")?;
    let batch = line.number("global_batch_size:", "global_batch_size")?;
    let reserved = line.number("max_memory_reserved:", "max_memory_reserved")?;
    Ok(Some(LoggedStep {
        step: step.unwrap_or(0.0) as u64,
        line: line.number,
        seconds,
        tflops_per_gpu: tflops,
        global_batch: batch.map(|b| b as u64),
        reserved: reserved.map(|b| b as u64),
        ..LoggedStep::default()
    }))
}
