//! nanotron: `iteration: 10 / 2000 | consumed_tokens: 1.05M | time_per_iteration_ms: 1.23K |
//! tokens_per_sec_per_gpu: 10.7K | …` (`src/nanotron/trainer.py`, `train_step_logs`).

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    if !line.text.contains("iteration:") || !line.text.contains("time_per_iteration_ms:") {
        return Ok(None);
    }
    let ms = line.number("time_per_iteration_ms:", "time_per_iteration_ms")?;
    Ok(Some(LoggedStep {
        step: line.number("iteration:", "iteration")?.unwrap_or(0.0) as u64,
        line: line.number,
        seconds: ms.map(|ms| ms / 1e3),
        tokens_per_s_per_gpu: line.number("tokens_per_sec_per_gpu:", "tokens_per_sec_per_gpu")?,
        tflops_per_gpu: line.number("model_tflops_per_gpu:", "model_tflops_per_gpu")?,
        ..LoggedStep::default()
    }))
}
