//! Hugging Face's Trainer (also under TRL, axolotl and LLaMA-Factory): its progress bar, ` 10%|█   | 10/100
//! [00:21<03:09,  2.10s/it]`. Bars with a title (loading data) are not read. An evaluation's bar
//! has no title either (transformers `ProgressCallback`); only its number of steps sets it apart.

use super::line::{Line, without_colour};
use super::log::{LogError, LoggedStep};

/// A progress bar without a title.
#[derive(Clone, Copy)]
struct Bar {
    done: u64,
    total: u64,
    /// Seconds since the bar began.
    elapsed: f64,
    /// Seconds per step; `None` at the beginning of the bar.
    seconds: Option<f64>,
}

impl Bar {
    fn read(text: &str) -> Option<Self> {
        if !text.contains("%|") {
            return None;
        }
        let text = without_colour(text);
        let (percent, rest) = text.trim().split_once("%|")?;
        let digits = !percent.is_empty() && percent.chars().all(|c| c.is_ascii_digit());
        let (_, counts) = rest.rsplit_once("| ").filter(|_| digits)?;
        let (done, rest) = counts.split_once('/')?;
        let (total, times) = rest.split_once('[')?;
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|n| n.is_finite());
        let elapsed = times.split('<').next()?.split(':');
        let elapsed = elapsed
            .map(number)
            .try_fold(0.0, |sum, n| Some(sum * 60.0 + n?));
        let (_, rate) = times.rsplit_once(", ")?;
        let rate = rate.trim().trim_end_matches(']');
        let seconds = match (rate.strip_suffix("s/it"), rate.strip_suffix("it/s")) {
            (Some(seconds), _) => number(seconds).filter(|n| *n >= 0.0),
            (None, Some(steps)) => number(steps).filter(|n| *n > 0.0).map(|n| 1.0 / n),
            (None, None) => None,
        };
        Some(Self {
            done: number(done)? as u64,
            total: number(total)? as u64,
            elapsed: elapsed?,
            seconds,
        })
    }
}

/// Numbers of steps of training: one, or more if a run was resumed with another number. The bar of
/// training is one that continues after another bar; if none does, the one that lasts longest.
pub(super) fn training_steps(text: &str) -> Vec<u64> {
    let parts = text.lines().flat_map(|line| line.split('\r'));
    let bars: Vec<Bar> = parts.filter_map(Bar::read).collect();
    let mut pairs = bars.windows(2);
    let goes_on = pairs.find(|pair| pair[0].total != pair[1].total && pair[1].done > 1);
    let longest = || bars.iter().max_by(|a, b| a.elapsed.total_cmp(&b.elapsed));
    let training = goes_on.map(|pair| &pair[1]).or_else(longest);
    let Some(total) = training.map(|bar| bar.total) else {
        return Vec::new();
    };
    let begin = bars.iter().position(|bar| bar.total == total).unwrap_or(0);
    let end = bars.iter().rposition(|bar| bar.total == total);
    let before = bars[..begin]
        .last()
        .filter(|bar| resumes(&bars, bar.total, total));
    let after = bars.get(end.unwrap_or(0) + 1);
    let after = after.filter(|bar| resumes(&bars, total, bar.total));
    let others = [before, after].into_iter().flatten();
    others.map(|bar| bar.total).chain([total]).collect()
}

/// Whether the bar of `after` steps continues an unfinished bar of `before` steps.
fn resumes(bars: &[Bar], before: u64, after: u64) -> bool {
    let of = |total: u64| bars.iter().filter(move |bar| bar.total == total);
    let begin = bars.iter().position(|bar| bar.total == after);
    let end = bars.iter().rposition(|bar| bar.total == before);
    let first = of(after).find(|bar| bar.done > 0).map(|bar| bar.done);
    let (Some(first), Some(last)) = (first, of(before).next_back()) else {
        return false;
    };
    let near = last.done / 2 < first && first <= last.done + 1;
    before != after && end < begin && last.done < before && first > 2 && near
}

/// Whether a line is a bar of another number of steps than training has.
pub(super) fn is_other_bar(text: &str, training: &[u64]) -> bool {
    Bar::read(text).is_some_and(|bar| !training.contains(&bar.total))
}

/// Reads a bar. Step 0, which has no rate yet, marks where a bar begins.
pub(super) fn step(line: &Line<'_>) -> Result<Option<LoggedStep>, LogError> {
    let bar = Bar::read(line.text).filter(|bar| bar.seconds.is_some() || bar.done == 0);
    Ok(bar.map(|bar| LoggedStep {
        step: bar.done,
        line: line.number,
        seconds: bar.seconds,
        ..LoggedStep::default()
    }))
}

/// Weight of the newest measurement in the rate that a progress bar shows: the default of tqdm's `smoothing`, which the Trainer keeps.
const SMOOTHING: f64 = 0.3;

/// Replaces the smoothed time per step that a progress bar shows by the time of each step, and removes step 0.
///
/// A bar divides the smoothed number of seconds between its updates by the smoothed number of steps (tqdm `std.py`, `update`). An
/// evaluation or a save lasts for one step only, but raises the time shown for about ten.
pub(super) fn unsmooth(steps: &mut Vec<LoggedStep>) {
    let mut last = 0;
    // Smoothed steps and seconds.
    let mut smoothed: Option<(f64, f64)> = None;
    for step in steps.iter_mut() {
        let new = step.step.saturating_sub(last) as f64;
        last = step.step;
        let Some(shown) = step.seconds else {
            smoothed = Some((0.0, 0.0));
            continue;
        };
        let Some((done, seconds)) = smoothed.filter(|_| new > 0.0) else {
            // The log begins amid a bar, or a bar restarted: its rate is taken as steady.
            smoothed = Some((1.0, shown));
            continue;
        };
        let kept = 1.0 - SMOOTHING;
        let now = SMOOTHING * new + kept * done;
        let passed = (shown * now - kept * seconds) / SMOOTHING;
        step.seconds = Some(passed / new).filter(|s| *s > 0.0);
        smoothed = Some((now, shown * now));
    }
    steps.retain(|step| step.step > 0);
}
