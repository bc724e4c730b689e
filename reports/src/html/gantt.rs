//! The pipeline Gantt: a canvas, and the events as compact JSON for the script that draws it.
//!
//! A large step has more events than anybody can look at. Up to [`MAX_EVENTS`] are carried; beyond
//! that first the pipeline ranks are thinned, always keeping the first and the last, then the
//! window is cut. The page says what was left out.

use std::collections::BTreeMap;

use maud::{Markup, PreEscaped, html};
use plans::{Event, Timeline};
use serde_json::{Value, json};

use super::page::{prose, script_safe, section as frame, undrawn};
use crate::format;
use crate::input::ReportInput;
use crate::perfetto;

/// Events a page carries: about 30 bytes each, so a page stays below one megabyte.
const MAX_EVENTS: usize = 30_000;

/// Ranks that are always drawn, however many events they have.
const MIN_RANKS: usize = 8;

/// The part of a timeline that is drawn.
struct Window<'a> {
    ranks: Vec<u32>,
    events: Vec<&'a Event>,
    left_out: Option<String>,
}

/// The Gantt section; empty without a timeline.
pub(super) fn section(input: &ReportInput) -> Markup {
    let Some(timeline) = input.timeline.filter(|t| !t.events.is_empty()) else {
        return html! {};
    };
    let window = window(timeline, MAX_EVENTS);
    let body = html! {
        div.tools #gantt-tools hidden {
            button type="button" data-gantt="in" aria-label="zoom in" { "+" }
            button type="button" data-gantt="out" aria-label="zoom out" { "−" }
            button type="button" data-gantt="reset" { "Whole step" }
            label {
                "Micro-batch "
                input #gantt-micro-batch type="number" min="0" placeholder="all";
            }
        }
        div #gantt-legend {}
        (undrawn())
        canvas #gantt-canvas tabindex="0" role="img"
            aria-label="Timeline of the step, a row for each pipeline rank" aria-describedby="gantt-note" {}
        div #gantt-axis aria-hidden="true" {}
        p.note #gantt-note {
            "Hover for details; click to follow a micro-batch; drag to move; Ctrl and wheel, or + \
             and −, to zoom. Under each row: pipeline transfers and data-parallel communication."
            @if let Some(left_out) = &window.left_out { " " (prose(left_out)) }
        }
        script #gantt-data type="application/json" {
            (PreEscaped(script_safe(&data(&window))))
        }
    };
    let lead = "One row per pipeline rank, from the start of the step to the optimizer.";
    frame("gantt", "Pipeline", lead, &body)
}

/// As much of the timeline as fits in `limit` events.
fn window(timeline: &Timeline, limit: usize) -> Window<'_> {
    let all: Vec<u32> = (0..timeline.ranks).collect();
    let total = timeline.events.len();
    if total <= limit {
        return Window {
            ranks: all,
            events: timeline.events.iter().collect(),
            left_out: None,
        };
    }
    let keep = (all.len() * limit / total).max(MIN_RANKS).min(all.len());
    let ranks = spread(timeline.ranks, keep);
    let drawn = |event: &&Event| ranks.contains(&event.rank);
    let mut events: Vec<&Event> = timeline.events.iter().filter(drawn).collect();
    events.sort_by(|a, b| a.start.0.total_cmp(&b.start.0));
    let mut left_out = format!("Shown are {keep} of {} ranks", timeline.ranks);
    if let Some(cut) = events.get(limit) {
        left_out += &format!(", and the first {} of the step", format::seconds(cut.start));
        events.truncate(limit);
    }
    left_out += "; `vescale-plan trace` writes every event.";
    Window {
        ranks,
        events,
        left_out: Some(left_out),
    }
}

/// `keep` numbers below `ranks`, evenly spread from the first to the last.
fn spread(ranks: u32, keep: usize) -> Vec<u32> {
    let last = u64::from(ranks.saturating_sub(1));
    let gaps = (keep as u64).saturating_sub(1).max(1);
    let chosen = (0..keep as u64).map(|i| u32::try_from(i * last / gaps));
    chosen.filter_map(Result::ok).collect()
}

/// `{ranks, kinds, end, events: [[row, stream, kind, stage, micro-batch, start, length]]}`, in
/// tenths of a microsecond; −1 stands for "none".
fn data(window: &Window) -> Value {
    let row_of: BTreeMap<u32, usize> = window.ranks.iter().copied().zip(0..).collect();
    let mut kinds: Vec<&str> = Vec::new();
    let mut index: BTreeMap<&str, usize> = BTreeMap::new();
    let mut end = 0.0f64;
    let mut events = Vec::with_capacity(window.events.len());
    for event in &window.events {
        let kind = event.action.kind.name();
        let kind = *index.entry(kind).or_insert_with(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        end = end.max(event.end.0);
        let [stage, micro_batch] = event.of().map_or([-1; 2], |of| of.map(i64::from));
        events.push(json!([
            row_of.get(&event.rank),
            perfetto::thread(event.stream).0,
            kind,
            stage,
            micro_batch,
            tenths(event.start.0),
            tenths(event.end.0 - event.start.0),
        ]));
    }
    json!({ "ranks": window.ranks, "kinds": kinds, "end": tenths(end), "events": events })
}

fn tenths(seconds: f64) -> i64 {
    (seconds * 1e7).round() as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use catalog::Seconds;
    use plans::{Action, ActionKind, Stream};

    fn timeline(ranks: u32, per_rank: u32) -> Timeline {
        let event = |rank, m| Event {
            rank,
            stream: Stream::Compute,
            action: Action {
                kind: ActionKind::F,
                stage: rank,
                micro_batch: m,
            },
            start: Seconds(f64::from(m)),
            end: Seconds(f64::from(m) + 1.0),
        };
        Timeline {
            ranks,
            events: (0..ranks)
                .flat_map(|rank| (0..per_rank).map(move |m| event(rank, m)))
                .collect(),
            memory: Vec::new(),
        }
    }

    #[test]
    fn small_timelines_are_whole() {
        let timeline = timeline(4, 5);
        let window = window(&timeline, 20);
        assert_eq!((window.ranks.len(), window.events.len()), (4, 20));
        assert_eq!(window.left_out, None);
        assert_eq!(data(&window)["kinds"], json!(["F"]));
    }

    #[test]
    fn large_timelines_keep_first_and_last_rank_and_say_what_is_missing() {
        let timeline = timeline(64, 100);
        let window = window(&timeline, 500);
        assert_eq!(window.ranks, [0, 9, 18, 27, 36, 45, 54, 63]);
        assert_eq!(window.events.len(), 500);
        insta::assert_snapshot!(
            window.left_out.expect("something is left out"),
            @"Shown are 8 of 64 ranks, and the first 62.0 s of the step; `vescale-plan trace` writes every event."
        );
    }
}
