//! Hugging Face's Trainer (also under TRL, axolotl and LLaMA-Factory): its progress bar, ` 10%|█   | 10/100
//! [00:21<03:09,  2.10s/it]`. Bars with a title (loading data) are not read. An evaluation's bar
//! has no title either (transformers `ProgressCallback`), nor may one of preparing data; their numbers of steps set them apart.

use std::collections::BTreeMap;

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
    /// Whether a loss was printed since the bar before it was drawn.
    after_loss: bool,
}

/// How the Trainer begins to print what it logs of training, through its bar of training.
const LOSS: &str = "{'loss':";

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
            after_loss: false,
        })
    }

    /// All bars of a log, in its order.
    fn all(text: &str) -> Vec<Self> {
        let mut bars = Vec::new();
        let mut after_loss = false;
        for part in text.lines().flat_map(|line| line.split('\r')) {
            let (before, loss) = match part.split_once(LOSS) {
                Some((before, _)) => (before, true),
                None => (part, false),
            };
            if let Some(bar) = Self::read(before) {
                bars.push(Self { after_loss, ..bar });
                after_loss = false;
            }
            after_loss |= loss;
        }
        bars
    }
}

/// The bar of training.
#[derive(Default)]
pub(super) struct Training {
    /// Its number of steps: none without a bar, several if a run was resumed with another number.
    totals: Vec<u64>,
    /// Whether the Trainer printed losses between its updates.
    pub(super) losses: bool,
}

/// Finds the bar of training: the one between whose updates losses are printed; else one that continues after another bar; else the one
/// that lasts longest of those that do not end, or of all.
pub(super) fn training(text: &str) -> Training {
    let bars = Bar::all(text);
    let by_losses = with_losses(&bars);
    let mut pairs = bars.windows(2);
    let goes_on = pairs.find(|pair| pair[0].total != pair[1].total && pair[1].done > 1);
    let goes_on = goes_on.map(|pair| pair[1].total);
    let total = by_losses.or(goes_on).or_else(|| longest(&bars));
    Training {
        totals: total.map_or_else(Vec::new, |total| continued(&bars, total)),
        losses: by_losses.is_some(),
    }
}

/// The number of steps of the bar that has most losses between its updates.
fn with_losses(bars: &[Bar]) -> Option<u64> {
    let mut losses = BTreeMap::new();
    let pairs = bars.windows(2);
    for pair in pairs.filter(|pair| pair[1].after_loss && pair[0].total == pair[1].total) {
        *losses.entry(pair[1].total).or_insert(0) += 1;
    }
    let most = losses.into_iter().max_by_key(|(_, count)| *count);
    most.map(|(total, _)| total)
}

/// The number of steps of the bar that lasts longest, of those that do not end or else of all.
fn longest(bars: &[Bar]) -> Option<u64> {
    let ends = |bar: &Bar| {
        bars.iter()
            .any(|of| of.total == bar.total && of.done >= of.total)
    };
    let long = |unfinished: bool| {
        let bars = bars.iter().filter(|bar| !(unfinished && ends(bar)));
        bars.max_by(|a, b| a.elapsed.total_cmp(&b.elapsed))
    };
    let bar = long(true).or_else(|| long(false))?;
    Some(bar.total)
}

/// A number of steps with those of bars that it continues or that continue it.
fn continued(bars: &[Bar], total: u64) -> Vec<u64> {
    let begin = bars.iter().position(|bar| bar.total == total).unwrap_or(0);
    let end = bars.iter().rposition(|bar| bar.total == total);
    let before = bars[..begin]
        .last()
        .filter(|bar| resumes(bars, bar.total, total));
    let after = bars.get(end.unwrap_or(0) + 1);
    let after = after.filter(|bar| resumes(bars, total, bar.total));
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

impl Training {
    /// Whether a line is a bar of another number of steps than training has.
    pub(super) fn is_other_bar(&self, text: &str) -> bool {
        Bar::read(text).is_some_and(|bar| !self.totals.contains(&bar.total))
    }
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
