//! The chart of step time against memory: a sample of the searched strategies, the plan and its alternatives, and a table
//! of the strategies that no other beats in both time and memory.

use catalog::Bytes;
use maud::{Markup, PreEscaped, html};
use plans::Decisions;
use plans::grammar::{recompute_name, written};
use serde_json::{Value, json};

use super::page::{script_safe, section as frame, undrawn};
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
    ("recompute", |d| json!(recompute_name(d.recompute))),
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
        (undrawn())
        p.note {
            "Large points are the plans found; the line joins the strategies that no other drawn here beats in both time and \
             memory; the dashed line is the memory that may be used. Hover for the strategy; drag to zoom, double-click to see \
             all."
        }
        details open[best.len() <= ROWS] {
            summary { "Strategies that fit and that no other drawn here beats in both time and memory: " (best.len()) }
            div.scroll { table.plain {
                thead { tr { th { "strategy" } th.num { "step" } th.num { "memory" } } }
                tbody {
                    @for point in best.iter().take(ROWS) {
                        tr {
                            td { code { (written(&point.decisions, input.runtime)) } }
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
            "{} of the {} strategies of the space, spread evenly over those within twice the plan's step time, and the plans \
             found; strategies that need more than 1.25 times the usable memory are not drawn.",
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

/// The chart's data. A row of `points`: memory in GiB, seconds, 1 if on the edge plus 2 if among
/// the plans found, the index of its value on each axis, indices of its `words`; sorted by memory.
fn data(input: &ReportInput, best: &[&Point]) -> Value {
    let gib = f64::from(1 << 30);
    let mut axes = AXES.map(|_| Numbered::default());
    let mut words = Numbered::default();
    let mut order: Vec<&Point> = input.points.iter().collect();
    order.sort_by_key(|point| point.peak_memory);
    let mut row = |point: &Point| {
        let edge = best.iter().any(|other| std::ptr::eq(*other, point));
        let mut row = vec![
            json!((point.peak_memory.as_f64() / gib * 100.0).round() / 100.0),
            json!((point.step_time.0 * 1e5).round() / 1e5),
            json!(u8::from(edge) + 2 * u8::from(point.found)),
        ];
        let values = axes.iter_mut().zip(AXES);
        row.extend(values.map(|(seen, (_, value))| json!(seen.number(value(&point.decisions)))));
        let strategy = written(&point.decisions, input.runtime);
        let strategy = strategy.split(' ').map(|word| words.number(json!(word)));
        row.extend(strategy.map(|number| json!(number)));
        Value::Array(row)
    };
    let points: Vec<Value> = order.into_iter().map(&mut row).collect();
    let axis = |((name, _), seen): (Axis, Numbered)| json!({"name": name, "values": seen.values});
    json!({
        "axes": AXES.into_iter().zip(axes).map(axis).collect::<Vec<Value>>(),
        "words": words.values,
        "usable": input.prediction.usable().as_f64() / gib,
        "points": points,
    })
}

/// Different values, numbered in the order in which they first come.
#[derive(Default)]
struct Numbered {
    values: Vec<Value>,
}

impl Numbered {
    fn number(&mut self, value: Value) -> usize {
        let known = self.values.iter().position(|seen| *seen == value);
        known.unwrap_or_else(|| {
            self.values.push(value);
            self.values.len() - 1
        })
    }
}
