//! Step time against memory of the best strategies, with the Pareto-optimal ones joined by a line.

use maud::{Markup, html};

use super::page::section as frame;
use crate::format;
use crate::input::{Alternative, ReportInput};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 44.0;
const MARGIN: f64 = 16.0;

/// A linear scale from data to pixels.
#[derive(Clone, Copy)]
struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

/// The Pareto plot; empty with fewer than two strategies.
pub(super) fn section(input: &ReportInput) -> Markup {
    if input.alternatives.len() < 2 {
        return html! {};
    }
    let x = scale(
        input.alternatives.iter().map(gib).chain([gib_of(input)]),
        LEFT,
        WIDTH - MARGIN,
    );
    let y = scale(
        input.alternatives.iter().map(|a| a.step_time.0),
        HEIGHT - BOTTOM,
        MARGIN,
    );
    let body = html! {
        svg.plot viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img"
            aria-label="step time against peak memory" {
            (axes(x, y))
            (capacity(input, x))
            path.frontier d=(frontier(&input.alternatives, x, y)) {}
            @for (index, point) in input.alternatives.iter().enumerate() {
                circle .first[index == 0] cx=(px(x, gib(point))) cy=(px(y, point.step_time.0))
                    r=(if index == 0 { 7 } else { 5 }) tabindex="0" data-tip=(tip(index, point)) {}
            }
        }
    };
    let lead = "Each dot is a strategy of the table. The line joins those that no other beats in \
                both time and memory.";
    frame("pareto", "Time against memory", lead, &body)
}

/// The Pareto frontier by growing memory, as an SVG path.
fn frontier(points: &[Alternative], x: Scale, y: Scale) -> String {
    let mut order: Vec<&Alternative> = points.iter().collect();
    order.sort_by(|a, b| {
        let memory = a.peak_memory.cmp(&b.peak_memory);
        memory.then(a.step_time.0.total_cmp(&b.step_time.0))
    });
    let mut best = f64::INFINITY;
    let mut path = String::new();
    for point in order {
        if point.step_time.0 < best {
            best = point.step_time.0;
            let command = if path.is_empty() { 'M' } else { 'L' };
            path += &format!("{command}{} {} ", px(x, gib(point)), px(y, best));
        }
    }
    path
}

fn axes(x: Scale, y: Scale) -> Markup {
    let base = HEIGHT - BOTTOM;
    html! {
        @for value in ticks(y) {
            line.grid x1=(LEFT) x2=(WIDTH - MARGIN) y1=(px(y, value)) y2=(px(y, value)) {}
            text.y x=(LEFT - 8.0) y=(px(y, value)) { (format::significant(value)) }
        }
        @for value in ticks(x) {
            text.x x=(px(x, value)) y=(base + 18.0) { (format::significant(value)) }
        }
        line.axis x1=(LEFT) x2=(WIDTH - MARGIN) y1=(base) y2=(base) {}
        text.x x=((LEFT + WIDTH - MARGIN) / 2.0) y=(HEIGHT - 6.0) { "peak memory, GiB" }
        text.title transform=(format!("translate(14 {}) rotate(-90)", base / 2.0)) {
            "step time, s"
        }
    }
}

fn capacity(input: &ReportInput, x: Scale) -> Markup {
    let at = px(x, gib_of(input));
    html! {
        line.capacity x1=(at) x2=(at) y1=(MARGIN) y2=(HEIGHT - BOTTOM)
            data-tip="usable memory: capacity less headroom" {}
    }
}

fn tip(index: usize, point: &Alternative) -> String {
    format!(
        "#{} {}\n{} · {} · MFU {}",
        index + 1,
        point.strategy,
        format::seconds(point.step_time),
        format::bytes(point.peak_memory),
        format::percent(point.mfu)
    )
}

fn gib(point: &Alternative) -> f64 {
    point.peak_memory.as_f64() / f64::from(1 << 30)
}

fn gib_of(input: &ReportInput) -> f64 {
    input.usable().as_f64() / f64::from(1 << 30)
}

fn scale(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Scale {
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values {
        low = low.min(value);
        high = high.max(value);
    }
    // A tenth of the range, or of the value where all are equal, keeps dots off the edges.
    let pad = ((high - low) * 0.1)
        .max(high.abs() * 0.005)
        .max(f64::MIN_POSITIVE);
    Scale {
        low: low - pad,
        high: high + pad,
        from,
        to,
    }
}

/// About five round values inside the scale.
fn ticks(scale: Scale) -> Vec<f64> {
    let rough = (scale.high - scale.low) / 5.0;
    let magnitude = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * magnitude);
    let step = steps.into_iter().find(|s| *s >= rough).unwrap_or(rough);
    let first = (scale.low / step).ceil() as i64;
    let last = (scale.high / step).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

/// Data to pixels, rounded to a tenth so that files are small.
fn px(scale: Scale, value: f64) -> f64 {
    let share = (value - scale.low) / (scale.high - scale.low);
    ((scale.from + share * (scale.to - scale.from)) * 10.0).round() / 10.0
}
