//! torchtitan: `step: 10 loss: … memory: 30.50GiB(38.5%) tps: 7,123 tflops: 412.3 mfu: 41.7%`
//! (`torchtitan/components/metrics.py`; `tps` is per device).

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    // `validate step: …` has the same numbers but is not a training step.
    let trains = line.text.contains("step:") && !line.text.contains("validate step:");
    if !trains || !line.text.contains(" tps: ") {
        return Ok(None);
    }
    let reserved = line.number("memory:", "memory")?;
    Ok(Some(LoggedStep {
        step: line.number("step:", "step")?.unwrap_or(0.0) as u64,
        line: line.number,
        tokens_per_s_per_gpu: line.number(" tps:", "tps")?,
        tflops_per_gpu: line.number("tflops:", "tflops")?,
        reserved: reserved.map(|bytes| bytes as u64),
        ..LoggedStep::default()
    }))
}

/// Number of retries in the warning `12 CUDA memory allocation retries.`
pub(super) fn retries(line: &Line<'_>) -> u64 {
    let Some((before, _)) = line.text.split_once(" memory allocation retries") else {
        return 0;
    };
    let words = before.split_whitespace().rev();
    words
        .filter_map(|word| word.parse().ok())
        .next()
        .unwrap_or(0)
}
