//! Logs of research code, each by a line of its own: InternEvo's `step=3 … tgs (tokens/gpu/second)=1031.73`,
//! modded-nanogpt's `step:12/5100 train_loss:… train_time:353ms step_avg:…` (time since the run began), and PyTorch's FSDP
//! examples' `Batch 3 Loss: …, Speed: 10.61 samples/sec` (of the whole job).

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn internevo(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    let rate = "tgs (tokens/gpu/second)=";
    if !line.text.contains(rate) || !line.text.contains(" step=") {
        return Ok(None);
    }
    Ok(Some(LoggedStep {
        step: line.number(" step=", "step")?.unwrap_or(0.0) as u64,
        line: line.number,
        tokens_per_s_per_gpu: line.number(rate, "tgs (tokens/gpu/second)")?,
        tflops_per_gpu: line.number("tflops=", "tflops")?,
        ..LoggedStep::default()
    }))
}

pub(super) fn nanogpt(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    let trains = line.text.contains("step:") && line.text.contains(" train_loss:");
    if !trains || !line.text.contains(" train_time:") {
        return Ok(None);
    }
    let ms = line.number(" train_time:", "train_time")?;
    Ok(Some(LoggedStep {
        step: line.number("step:", "step")?.unwrap_or(0.0) as u64,
        line: line.number,
        elapsed: ms.map(|ms| ms / 1e3),
        ..LoggedStep::default()
    }))
}

pub(super) fn fsdp_example(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    if !line.text.contains(" Speed: ") || !line.text.contains(" samples/sec") {
        return Ok(None);
    }
    let Some(step) = line.number("Batch ", "Batch")? else {
        return Ok(None);
    };
    Ok(Some(LoggedStep {
        step: step as u64,
        line: line.number,
        sequences_per_s: line.number(" Speed: ", "Speed")?,
        ..LoggedStep::default()
    }))
}
