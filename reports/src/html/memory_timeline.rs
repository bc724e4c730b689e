//! The chart of memory allocated over the step, one line per pipeline rank, against the memory that a plan may use.

use std::collections::BTreeMap;

use catalog::{Bytes, Seconds};
use maud::{Markup, PreEscaped, html};
use plans::Timeline;
use serde_json::{Value, json};

use super::page::{script_safe, section as frame, undrawn};
use crate::format;
use crate::input::ReportInput;

const GIB: f64 = 1_073_741_824.0;

/// Number of values per line, each the largest in its part of the step, so that peaks survive.
const POINTS: usize = 400;

/// Lines drawn besides the heaviest rank's.
const OTHERS: usize = 7;

/// The chart; empty where the report has no timeline.
pub(super) fn section(input: &ReportInput) -> Markup {
    let Some(timeline) = input.timeline.filter(|t| !t.memory.is_empty()) else {
        return html! {};
    };
    let heaviest = input.prediction.peak_rank;
    let usable = input.prediction.usable();
    let data = data(timeline, input.prediction.step_time, heaviest, usable);
    let label = format!(
        "Memory over the step: pipeline rank {heaviest} needs the most, {} of {}",
        format::bytes(input.prediction.peak_memory),
        format::bytes(usable)
    );
    let body = html! {
        div #memory-chart role="img" aria-label=(label) {}
        (undrawn())
        script #memory-data type="application/json" { (PreEscaped(script_safe(&data))) }
    };
    let lead = format!(
        "GiB allocated on pipeline rank {heaviest}, the heaviest (bold), and on others, without what the allocator rounds up. \
         Each value is the most in 1/{POINTS} of the step, so shorter dips do not show. The dashed line is the memory that may \
         be used."
    );
    frame("memory-time", "Memory over the step", &lead, &body)
}

/// The chart's data: points in time in seconds, and for every drawn rank its memory then in GiB.
fn data(timeline: &Timeline, step: Seconds, heaviest: u32, usable: Bytes) -> Value {
    let mut changes: BTreeMap<u32, Vec<(f64, Bytes)>> = BTreeMap::new();
    for (rank, time, bytes) in &timeline.memory {
        changes.entry(*rank).or_default().push((time.0, *bytes));
    }
    let seconds = |point: usize| point as f64 / POINTS as f64 * step.0;
    let line = |rank: u32| {
        let mut changes = changes[&rank].clone();
        changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut left = changes.iter().peekable();
        let mut now = changes[0].1;
        let values = (0..=POINTS).map(|point| {
            let mut highest = now;
            while let Some((_, bytes)) = left.next_if(|(time, _)| *time < seconds(point + 1)) {
                highest = highest.max(*bytes);
                now = *bytes;
            }
            (highest.as_f64() / GIB * 100.0).round() / 100.0
        });
        json!({ "rank": rank, "gib": values.collect::<Vec<f64>>() })
    };
    let times = (0..=POINTS).map(|point| (seconds(point) * 1e5).round() / 1e5);
    json!({
        "usable": usable.as_f64() / GIB,
        "heaviest": heaviest,
        "seconds": times.collect::<Vec<f64>>(),
        "lines": drawn(&changes, heaviest).into_iter().map(line).collect::<Vec<Value>>(),
    })
}

/// Some ranks, evenly spread, and the heaviest last so that it is drawn on top.
fn drawn(ranks: &BTreeMap<u32, Vec<(f64, Bytes)>>, heaviest: u32) -> Vec<u32> {
    let others: Vec<u32> = ranks.keys().copied().filter(|r| *r != heaviest).collect();
    let step = others.len().div_ceil(OTHERS).max(1);
    let mut drawn: Vec<u32> = others.into_iter().step_by(step).collect();
    drawn.extend(ranks.contains_key(&heaviest).then_some(heaviest));
    drawn
}
