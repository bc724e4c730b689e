//! The chart of step time against memory: a sample of the searched strategies, the plan and its alternatives, and a table
//! of the strategies that no other beats in both time and memory.

use catalog::Bytes;
use maud::{Markup, PreEscaped, html};
use plans::Decisions;
use serde_json::{Value, json};

use super::page::{script_safe, section as frame};
use crate::format;
use crate::input::{Point, ReportInput};

/// Rows of the table of strategies that no other beats.
const ROWS: usize = 12;

/// A field of a strategy that the reader can filter points by: its name, and how to read its value.
type Axis = (&'static str, fn(&Decisions) -> Value);

const AXES: [Axis; 8] = [
    ("tp", |d| json!(d.tp)),
    ("pp", |d| json!(d.pp)),
    ("vpp", |d| json!(d.vpp)),
    ("cp", |d| json!(d.cp)),
    ("ep", |d| json!(d.ep)),
    ("mbs", |d| json!(d.micro_batch)),
    ("zero", |d| json!(u8::from(d.zero))),
    ("recompute", |d| {
        json!(plans::grammar::recompute_name(d.recompute))
    }),
];

/// The section of the chart and its table; empty if there are fewer than two points.
pub(super) fn section(input: &ReportInput) -> Markup {
    let points = &input.points;
    if points.len() < 2 {
        return html! {};
    }
    let best = frontier(points, input.prediction.usable());
    let body = html! {
        p.filters #pareto-filters {}
        div #pareto-chart role="img" aria-label="Step time against peak memory; the table below lists the strategies at its edge" {}
        p.note {
            "Hover for the strategy; drag to zoom, double-click to see all. The dashed line is the memory that may be used."
        }
        details open[best.len() <= ROWS] {
            summary { "Strategies that fit and that no other drawn here beats in both time and memory: " (best.len()) }
            div.scroll { table {
                thead { tr { th { "strategy" } th.num { "step" } th.num { "memory" } } }
                tbody {
                    @for point in best.iter().take(ROWS) {
                        tr {
                            td { code { (plans::grammar::short(&point.decisions)) } }
                            td.num { (format::seconds(point.step_time)) }
                            td.num { (format::bytes(point.peak_memory)) }
                        }
                    }
                }
            } }
            @if best.len() > ROWS { p.note { "The fastest " (ROWS) " are listed." } }
        }
        script #pareto-data type="application/json" { (PreEscaped(script_safe(&data(input, &best)))) }
    };
    let lead = match input.space {
        Some(space) => format!(
            "{} strategies of the {} of the space, evenly spread over those that take less than twice the plan's time, and \
             the plans found; what takes more than 1.25 of the memory is not drawn.",
            format::count(points.len() as u64),
            format::count(space.strategies)
        ),
        None => "The plan and the strategies that differ from it in one decision.".to_owned(),
    };
    frame("pareto", "Time against memory", &lead, &body)
}

/// The points that fit and that no other beats in both time and memory, fastest first.
fn frontier(points: &[Point], usable: Bytes) -> Vec<&Point> {
    let fit = points.iter().filter(|point| point.peak_memory <= usable);
    let mut order: Vec<&Point> = fit.collect();
    order.sort_by(|a, b| {
        let time = a.step_time.0.total_cmp(&b.step_time.0);
        time.then(a.peak_memory.cmp(&b.peak_memory))
    });
    let mut found: Vec<&Point> = Vec::new();
    for point in order {
        if found
            .last()
            .is_none_or(|last| point.peak_memory < last.peak_memory)
        {
            found.push(point);
        }
    }
    found
}

/// What the chart draws: `points` are memory in GiB, seconds, whether the strategy is among the plans found and whether
/// on the edge, values of the axes, and the strategy; by rising memory.
fn data(input: &ReportInput, best: &[&Point]) -> Value {
    let gib = f64::from(1 << 30);
    let row = |point: &Point| {
        let mut row = vec![
            json!((point.peak_memory.as_f64() / gib * 100.0).round() / 100.0),
            json!((point.step_time.0 * 1e5).round() / 1e5),
            json!(u8::from(point.found)),
            json!(u8::from(
                best.iter().any(|other| std::ptr::eq(*other, point))
            )),
        ];
        row.extend(AXES.iter().map(|(_, value)| value(&point.decisions)));
        row.push(json!(plans::grammar::short(&point.decisions)));
        Value::Array(row)
    };
    let mut order: Vec<&Point> = input.points.iter().collect();
    order.sort_by_key(|point| point.peak_memory);
    json!({
        "axes": AXES.map(|(name, _)| name),
        "usable": input.prediction.usable().as_f64() / gib,
        "points": order.into_iter().map(row).collect::<Vec<Value>>(),
    })
}
