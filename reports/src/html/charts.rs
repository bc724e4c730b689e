//! Bars and plots, as HTML and SVG.

use maud::{Markup, html};
use plans::Prediction;
use plans::grammar::short;

use super::{ReportInput, gib};

const PARTS: usize = 10;

/// Parts of the step with a colour class each.
fn parts(p: &Prediction) -> [(&'static str, &'static str, f64); PARTS] {
    let b = &p.breakdown;
    [
        ("compute", "c0", b.compute_s),
        ("recomputation", "c1", b.recompute_s),
        ("exposed TP", "c2", b.tp_exposed_s),
        ("exposed CP", "c3", b.cp_exposed_s),
        ("exposed EP", "c4", b.ep_exposed_s),
        ("exposed DP", "c5", b.dp_exposed_s),
        ("exposed PP", "c6", b.pp_exposed_s),
        ("bubble", "c7", b.bubble_s),
        ("optimizer", "c8", b.optimizer_s),
        ("host", "c9", b.host_s),
    ]
}

/// The stacked bar of the step time.
pub(super) fn time(input: &ReportInput<'_>) -> Markup {
    let p = &input.best.prediction;
    let shown: Vec<_> = parts(p)
        .into_iter()
        .filter(|part| part.2 > 0.0005 * p.step_time.0)
        .collect();
    html! {
        section {
            h2 { "Where the step goes" }
            div.stack { @for (name, class, s) in &shown {
                div class=(format!("part {class}")) style=(format!("flex-grow:{:.6}", s / p.step_time.0)) title=(format!("{name}: {:.1} ms", s * 1e3)) {}
            } }
            ul.legend { @for (name, class, s) in &shown { li { span class=(format!("dot {class}")) {} (name) " " strong { (format!("{:.1}%", s / p.step_time.0 * 100.0)) } " " span.small { (format!("{:.1} ms", s * 1e3)) } } } }
        }
    }
}

/// Peak memory of every stage against capacity.
pub(super) fn memory(input: &ReportInput<'_>) -> Markup {
    let p = &input.best.prediction;
    let most = p
        .memory_by_rank
        .iter()
        .map(|b| b.as_f64())
        .fold(input.device_memory.as_f64(), f64::max);
    let limit = input.capacity.as_f64() / most * 100.0;
    html! {
        section {
            h2 { "Memory by pipeline rank" }
            div.bars { @for (rank, bytes) in p.memory_by_rank.iter().enumerate() {
                div.bar-row { span.bar-name { "rank " (rank) } div.track {
                    div.fill.over[*bytes > input.capacity] style=(format!("width:{:.2}%", bytes.as_f64() / most * 100.0)) {}
                    div.limit style=(format!("left:{limit:.2}%")) title=(format!("limit {}", gib(input.capacity.as_f64()))) {}
                } span.bar-value { (gib(bytes.as_f64())) } }
            } }
        }
    }
}

/// Step time against memory of the best plans.
pub(super) fn pareto(input: &ReportInput<'_>) -> Markup {
    let points: Vec<(f64, f64, String, bool)> = input
        .top
        .iter()
        .map(|c| {
            let p = &c.prediction;
            let text = format!("{}: {}, {}", short(&c.strategy), p.step_time, p.peak_memory);
            let beaten = input.top.iter().any(|o| {
                o.prediction.step_time < p.step_time && o.prediction.peak_memory < p.peak_memory
            });
            (
                p.step_time.0,
                p.peak_memory.as_f64() / 1024f64.powi(3),
                text,
                !beaten,
            )
        })
        .collect();
    if points.len() < 2 {
        return html! {};
    }
    let (x0, x1) = range(points.iter().map(|p| p.0));
    let (y0, y1) = range(points.iter().map(|p| p.1));
    let at = |x: f64, y: f64| {
        (
            60.0 + (x - x0) / (x1 - x0) * 680.0,
            260.0 - (y - y0) / (y1 - y0) * 230.0,
        )
    };
    html! {
        section {
            h2 { "Time against memory" }
            svg.plot viewBox="0 0 780 310" role="img" aria-label="step time against peak memory" {
                line x1="60" y1="260" x2="740" y2="260" {} line x1="60" y1="30" x2="60" y2="260" {}
                text x="400" y="302" text-anchor="middle" { "step time, s" }
                text x="60" y="18" { "peak memory, GiB" }
                text x="60" y="280" text-anchor="middle" { (format!("{x0:.2}")) } text x="740" y="280" text-anchor="middle" { (format!("{x1:.2}")) }
                text x="52" y="262" text-anchor="end" { (format!("{y0:.0}")) } text x="52" y="36" text-anchor="end" { (format!("{y1:.0}")) }
                @for (i, (x, y, text, front)) in points.iter().enumerate() {
                    @let (cx, cy) = at(*x, *y);
                    circle.point.best[i == 0].front[*front] cx=(format!("{cx:.1}")) cy=(format!("{cy:.1}")) r="6" { title { (text) } }
                }
            }
            p.small { "Filled: the plan. Ringed: nothing listed is both faster and lighter." }
        }
    }
}

/// Ends of an axis, a little beyond the values.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, 0f64), |(l, h), v| (l.min(v), h.max(v)));
    let pad = ((high - low) * 0.1).max(high * 0.01);
    (low - pad, high + pad)
}

/// Memory over the step on the heaviest rank.
pub(super) fn memory_timeline(input: &ReportInput<'_>) -> Markup {
    let rank = input.best.prediction.peak_rank;
    let samples: Vec<(f64, f64)> = input
        .timeline
        .memory
        .iter()
        .filter(|(r, _, _)| *r == rank)
        .map(|(_, at, bytes)| (at.0, bytes.as_f64() / 1024f64.powi(3)))
        .collect();
    if samples.len() < 2 {
        return html! {};
    }
    let end = samples.iter().fold(0f64, |m, s| m.max(s.0));
    let top = samples.iter().fold(0f64, |m, s| m.max(s.1)) * 1.05;
    let stride = samples.len().div_ceil(2000);
    let mut path = String::new();
    let mut previous = 0.0;
    for chunk in samples.chunks(stride) {
        // The largest of a chunk, so that thinning never hides the peak.
        let (at, gib) = chunk
            .iter()
            .copied()
            .fold((chunk[0].0, 0f64), |m, s| (m.0, m.1.max(s.1)));
        let x = 60.0 + at / end * 680.0;
        let y = 190.0 - gib / top * 160.0;
        let step = if path.is_empty() {
            format!("M{x:.1} {y:.1}")
        } else {
            format!("L{x:.1} {previous:.1}L{x:.1} {y:.1}")
        };
        path.push_str(&step);
        previous = y;
    }
    html! {
        section {
            h2 { "Memory over the step, pipeline rank " (rank) }
            svg.plot viewBox="0 0 780 230" role="img" aria-label="memory over time" {
                line x1="60" y1="190" x2="740" y2="190" {} line x1="60" y1="30" x2="60" y2="190" {}
                path.curve d=(path) {}
                text x="52" y="36" text-anchor="end" { (format!("{top:.0}")) } text x="52" y="192" text-anchor="end" { "0" }
                text x="60" y="18" { "GiB allocated" } text x="740" y="212" text-anchor="end" { (format!("{end:.2} s")) }
            }
        }
    }
}
