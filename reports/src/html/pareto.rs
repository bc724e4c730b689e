//! Step time against memory of the best strategies, with the Pareto-optimal ones joined by a line.

use maud::{Markup, html};

use super::page::section as frame;
use super::scale::Scale;
use crate::format;
use crate::input::{Alternative, ReportInput};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 44.0;
const MARGIN: f64 = 16.0;

/// The Pareto plot; empty with fewer than two strategies.
pub(super) fn section(input: &ReportInput) -> Markup {
    if input.alternatives.len() < 2 {
        return html! {};
    }
    let x = Scale::around(
        input.alternatives.iter().map(gib).chain([gib_of(input)]),
        LEFT,
        WIDTH - MARGIN,
    );
    let y = Scale::around(
        input.alternatives.iter().map(|a| a.step_time.0),
        HEIGHT - BOTTOM,
        MARGIN,
    );
    let body = html! {
        div.scroll { svg.plot viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="group"
            aria-label="step time against peak memory" {
            (axes(x, y))
            (capacity(input, x))
            path.frontier d=(frontier(&input.alternatives, x, y)) {}
            // The first is drawn last, so that no other lies on it.
            @let dots = input.alternatives.iter().enumerate();
            @for (index, point) in dots.clone().skip(1).chain(dots.take(1)) {
                circle .first[index == 0] cx=(x.px(gib(point))) cy=(y.px(point.step_time.0))
                    r=(if index == 0 { 7 } else { 5 }) tabindex="0" role="img" aria-label=(tip(index, point))
                    data-tip=(tip(index, point)) {}
            }
        } }
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
            path += &format!("{command}{} {} ", x.px(gib(point)), y.px(best));
        }
    }
    path
}

fn axes(x: Scale, y: Scale) -> Markup {
    let base = HEIGHT - BOTTOM;
    html! {
        @for value in y.ticks() {
            line.grid x1=(LEFT) x2=(WIDTH - MARGIN) y1=(y.px(value)) y2=(y.px(value)) {}
            text.y x=(LEFT - 8.0) y=(y.px(value)) { (format::significant(value)) }
        }
        @for value in x.ticks() {
            text.x x=(x.px(value)) y=(base + 18.0) { (format::significant(value)) }
        }
        line.axis x1=(LEFT) x2=(WIDTH - MARGIN) y1=(base) y2=(base) {}
        text.x x=((LEFT + WIDTH - MARGIN) / 2.0) y=(HEIGHT - 6.0) { "peak memory, GiB" }
        text.title transform=(format!("translate(14 {}) rotate(-90)", base / 2.0)) {
            "step time, s"
        }
    }
}

fn capacity(input: &ReportInput, x: Scale) -> Markup {
    let at = x.px(gib_of(input));
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
