//! Memory in use over the step, one line per pipeline rank, against the memory that a plan may use.

use std::collections::BTreeMap;

use catalog::{Bytes, Seconds};
use maud::{Markup, html};
use plans::Timeline;

use super::page::section as frame;
use super::scale::Scale;
use crate::format;
use crate::input::ReportInput;

const GIB: f64 = 1_073_741_824.0;
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 40.0;
const MARGIN: f64 = 12.0;

/// Points per line: each holds the largest value of its share of the step, so peaks survive.
const POINTS: usize = 400;

/// Lines drawn besides the heaviest rank's.
const OTHERS: usize = 7;

/// The plot of every rank's memory over the step; empty where the report has no timeline.
pub(super) fn section(input: &ReportInput) -> Markup {
    let Some(timeline) = input.timeline.filter(|t| !t.memory.is_empty()) else {
        return html! {};
    };
    let lines = lines(timeline);
    let end = input.prediction.step_time.0;
    let highest = timeline.memory.iter().map(|(_, _, bytes)| *bytes).max();
    let usable = input.prediction.usable();
    let top = highest.unwrap_or_default().max(usable).as_f64() * 1.06;
    let at = move |time: f64, bytes: Bytes| {
        let x = LEFT + (time / end).min(1.0) * (WIDTH - LEFT - MARGIN);
        let y = HEIGHT - BOTTOM - bytes.as_f64() / top * (HEIGHT - BOTTOM - MARGIN);
        (tenth(x), tenth(y))
    };
    let heaviest = input.prediction.peak_rank;
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Chart of memory over the step" {
        svg.plot viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label="memory over the step" {
            (axes(top, end, &at))
            line.capacity x1=(LEFT) x2=(WIDTH - MARGIN) y1=(at(0.0, usable).1) y2=(at(0.0, usable).1)
                data-tip="usable memory: capacity less headroom" {}
            @for rank in drawn(&lines, heaviest) {
                path.memory .heaviest[rank == heaviest]
                    d=(path(&lines[&rank], &at)) data-tip=(format!("pipeline rank {rank}")) {}
            }
        } }
    };
    let lead = format!(
        "GiB in use on pipeline rank {heaviest}, the heaviest (bold), and on others; the line is \
         what may be used."
    );
    frame("memory-time", "Memory over the step", &lead, &body)
}

/// Changes of every rank in order of time.
fn lines(timeline: &Timeline) -> BTreeMap<u32, Vec<(f64, Bytes)>> {
    let mut lines: BTreeMap<u32, Vec<(f64, Bytes)>> = BTreeMap::new();
    for (rank, time, bytes) in &timeline.memory {
        lines.entry(*rank).or_default().push((time.0, *bytes));
    }
    for line in lines.values_mut() {
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines
}

/// Some ranks, evenly spread, and the heaviest last so that it is drawn on top.
fn drawn(lines: &BTreeMap<u32, Vec<(f64, Bytes)>>, heaviest: u32) -> Vec<u32> {
    let others: Vec<u32> = lines.keys().copied().filter(|r| *r != heaviest).collect();
    let step = others.len().div_ceil(OTHERS).max(1);
    let mut ranks: Vec<u32> = others.into_iter().step_by(step).collect();
    if lines.contains_key(&heaviest) {
        ranks.push(heaviest);
    }
    ranks
}

/// A step line through at most [`POINTS`] values.
fn path(line: &[(f64, Bytes)], at: &impl Fn(f64, Bytes) -> (f64, f64)) -> String {
    let chunk = line.len().div_ceil(POINTS).max(1);
    let mut path = String::new();
    for values in line.chunks(chunk) {
        let highest = values.iter().map(|(_, bytes)| *bytes).max();
        let (x, y) = at(values[0].0, highest.unwrap_or_default());
        if path.is_empty() {
            path = format!("M{x} {y}");
        } else {
            path += &format!("H{x}V{y}");
        }
    }
    path + &format!("H{}", WIDTH - MARGIN)
}

fn axes(top: f64, end: f64, at: &impl Fn(f64, Bytes) -> (f64, f64)) -> Markup {
    let base = HEIGHT - BOTTOM;
    let from_zero = |high: f64| Scale { low: 0.0, high };
    // The cast only places grid lines.
    let bytes = |gib: f64| Bytes((gib * GIB) as u64);
    html! {
        @for gib in from_zero(top / GIB).ticks() {
            @let y = at(0.0, bytes(gib)).1;
            line.grid x1=(LEFT) x2=(WIDTH - MARGIN) y1=(y) y2=(y) {}
            text.y x=(LEFT - 8.0) y=(y) { (format::significant(gib)) }
        }
        @for time in from_zero(end).ticks() {
            text.x x=(at(time, Bytes(0)).0) y=(base + 18.0) { (format::seconds(Seconds(time))) }
        }
        line.axis x1=(LEFT) x2=(WIDTH - MARGIN) y1=(base) y2=(base) {}
        text.title transform=(format!("translate(14 {}) rotate(-90)", base / 2.0)) { "GiB in use" }
    }
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
