//! MaxText: `completed step: 9, seconds: 3.139, TFLOP/s/device: 419.7, Tokens/s/device: 7831.5, …`.

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    if !line.text.contains("completed step:") || !line.text.contains(", seconds:") {
        return Ok(None);
    }
    let seconds = line.number(", seconds:", "seconds")?;
    let step = line.number("completed step:", "completed step")?;
    let tokens = line.number("Tokens/s/device:", "Tokens/s/device")?;
    let tflops = line.number("TFLOP/s/device:", "TFLOP/s/device")?;
    Ok(Some(LoggedStep {
        step: step.unwrap_or(0.0) as u64,
        line: line.number,
        seconds,
        tokens_per_s_per_gpu: tokens,
        tflops_per_gpu: tflops,
        ..LoggedStep::default()
    }))
}
