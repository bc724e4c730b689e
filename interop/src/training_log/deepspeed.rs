//! DeepSpeed: `epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5,
//! MemAllocated=10.5GB, MaxMemAllocated=30.1GB` (`deepspeed/utils/timer.py`; samples of the whole job).

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    if !line.text.contains("CurrSamplesPerSec=") {
        return Ok(None);
    }
    let rate = line.number("CurrSamplesPerSec=", "CurrSamplesPerSec")?;
    let step = line.number("global_step=", "global_step")?;
    Ok(Some(LoggedStep {
        step: step.unwrap_or(0.0) as u64,
        line: line.number,
        sequences_per_s: rate,
        ..LoggedStep::default()
    }))
}
