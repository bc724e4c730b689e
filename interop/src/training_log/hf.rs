//! Hugging Face's Trainer (also under TRL, axolotl and LLaMA-Factory): its progress bar, ` 10%|█   | 10/100
//! [00:21<03:09,  2.10s/it]`. Bars with a title are of loading and preparing data.

use super::line::Line;
use super::log::{LogError, LoggedStep};

pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    let text = line.text.trim();
    let Some((percent, rest)) = text.split_once("%|") else {
        return Ok(None);
    };
    if percent.is_empty() || !percent.chars().all(|c| c.is_ascii_digit()) {
        return Ok(None);
    }
    let parts = rest.rsplit_once("| ").and_then(|(_, counts)| {
        let (done, rest) = counts.split_once('/')?;
        let (_, rate) = rest.rsplit_once(", ")?;
        Some((done.trim(), rate.trim().trim_end_matches(']')))
    });
    let Some((done, rate)) = parts else {
        return Ok(None);
    };
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|n| n.is_finite());
    let seconds = match (rate.strip_suffix("s/it"), rate.strip_suffix("it/s")) {
        (Some(seconds), _) => number(seconds),
        (None, Some(steps)) => number(steps).filter(|n| *n > 0.0).map(|n| 1.0 / n),
        (None, None) => None,
    };
    let (Some(step), Some(seconds)) = (number(done), seconds) else {
        return Ok(None);
    };
    Ok(Some(LoggedStep {
        step: step as u64,
        line: line.number,
        seconds: Some(seconds),
        ..LoggedStep::default()
    }))
}
