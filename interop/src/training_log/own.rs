//! Our own `run --log`: a JSON object a line, `{"step":9,"loss":…,"step_time_s":0.31,…,"peak_memory_bytes":…}`.

use serde::Deserialize;

use super::line::Line;
use super::log::{LogError, LoggedStep};

#[derive(Deserialize)]
struct Logged {
    step: u64,
    step_time_s: f64,
    peak_memory_bytes: Option<u64>,
}

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    let text = line.text.trim();
    if !text.starts_with('{') || !text.contains("\"step_time_s\"") {
        return Ok(None);
    }
    let Ok(logged) = serde_json::from_str::<Logged>(text) else {
        return Err(line.wrong("step_time_s", text));
    };
    Ok(Some(LoggedStep {
        step: logged.step,
        line: line.number,
        seconds: Some(logged.step_time_s),
        reserved: logged.peak_memory_bytes,
        ..LoggedStep::default()
    }))
}
