//! The pipeline Gantt: every pipeline rank's streams over the step, with hover and zoom.

use maud::{Markup, html};
use plans::{Event, Stream};

use super::ReportInput;

/// Most bars drawn: beyond that the page grows past what a browser scrolls smoothly.
const MOST_BARS: usize = 9000;
const ROW: f64 = 22.0;
const LEFT: f64 = 60.0;
const WIDTH: f64 = 1000.0;

/// The section.
pub(super) fn section(input: &ReportInput<'_>) -> Markup {
    let timeline = input.timeline;
    let shown = ranks_shown(timeline.ranks, timeline.events.len());
    let events: Vec<&Event> = timeline
        .events
        .iter()
        .filter(|e| e.stream == Stream::Compute && shown.contains(&e.rank))
        .take(MOST_BARS)
        .collect();
    let end = timeline.events.iter().fold(0f64, |m, e| m.max(e.end.0));
    if events.is_empty() || end <= 0.0 {
        return html! {};
    }
    let height = ROW * shown.len() as f64 + 24.0;
    let total = timeline
        .events
        .iter()
        .filter(|e| e.stream == Stream::Compute)
        .count();
    html! {
        section {
            h2 { "The step on every pipeline rank" }
            p.small {
                "Hover for details; click an action to highlight its micro-batch; scroll with Ctrl to zoom. "
                @if events.len() < total { "Shown: " (events.len()) " of " (total) " actions, on " (shown.len()) " of " (timeline.ranks) " ranks." }
            }
            div.gantt-frame { svg #gantt viewBox=(format!("0 0 {} {height}", LEFT + WIDTH + 10.0)) width="100%" {
                @for (index, rank) in shown.iter().enumerate() {
                    text x="4" y=(format!("{:.1}", index as f64 * ROW + 15.0)) { "rank " (rank) }
                }
                g #bars { @for e in events {
                    @let row = shown.iter().position(|r| *r == e.rank).unwrap_or(0);
                    @let x = LEFT + e.start.0 / end * WIDTH;
                    @let w = ((e.end.0 - e.start.0) / end * WIDTH).max(0.15);
                    rect class=(class(&e.name)) x=(format!("{x:.2}")) y=(format!("{:.0}", row as f64 * ROW + 2.0))
                        width=(format!("{w:.2}")) height="18"
                        data-m=[e.micro_batch]
                        data-t=(format!("{} · rank {} · {:.2}–{:.2} ms ({:.2} ms)", e.name, e.rank, e.start.0 * 1e3, e.end.0 * 1e3, (e.end.0 - e.start.0) * 1e3)) {}
                } }
                text x=(format!("{:.0}", LEFT)) y=(format!("{:.0}", height - 6.0)) { "0" }
                text x=(format!("{:.0}", LEFT + WIDTH)) y=(format!("{:.0}", height - 6.0)) text-anchor="end" { (format!("{:.1} ms", end * 1e3)) }
            } }
            div #tip role="status" hidden {}
        }
    }
}

/// All ranks when they are few, else the first ones and the last.
fn ranks_shown(ranks: u32, events: usize) -> Vec<u32> {
    let per_rank = (events / ranks.max(1) as usize).max(1);
    let most = (MOST_BARS / per_rank).clamp(2, 32) as u32;
    if ranks <= most {
        return (0..ranks).collect();
    }
    (0..most - 1).chain([ranks - 1]).collect()
}

fn class(name: &str) -> &'static str {
    match name.as_bytes().first() {
        Some(b'F') => "f",
        Some(b'B') => "b",
        Some(b'I') => "i",
        Some(b'W') => "w",
        _ => "o",
    }
}
