//! The report of a training run: what was measured beside what was predicted.

use catalog::{Bytes, Seconds};
use maud::{Markup, PreEscaped, html};
use plans::{Event, Stream, Timeline};
use serde::Serialize;
use serde_json::json;

use super::page::{charts, document, heads, script, script_safe, section as frame};
use crate::format;

/// Most events in a drawing; beyond that only the earliest are shown.
const MAX_EVENTS: usize = 4000;
/// Height of a pipeline rank's row, in the drawing's units.
const ROW: f64 = 22.0;
/// Width of the drawing, in its own units.
const WIDTH: f64 = 1000.0;

/// A training run as its report shows it.
#[derive(Clone, Copy, Debug)]
pub struct RunReport<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// Strategy in its short form.
    pub strategy: &'a str,
    /// Number of ranks.
    pub ranks: usize,
    /// Mean loss of every step.
    pub losses: &'a [f64],
    /// Median step time.
    pub step_time: Seconds,
    /// Predicted step time; absent where this machine has no profile.
    pub predicted_step_time: Option<Seconds>,
    /// Tokens per second over all ranks.
    pub tokens_per_s: f64,
    /// Time of each kind of action on each pipeline rank.
    pub phases: &'a [Phase],
    /// Peak bytes of each kind on each pipeline rank.
    pub memory: &'a [Held],
    /// Timeline of the last step as measured.
    pub measured: &'a Timeline,
    /// Timeline of a step as predicted, if it was.
    pub predicted: Option<&'a Timeline>,
    /// Version of the tool.
    pub version: &'a str,
}

/// All actions of one kind on one pipeline rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phase {
    /// Index of the pipeline rank.
    pub rank: u64,
    /// Kind of action.
    #[serde(rename = "phase")]
    pub name: String,
    /// Number of actions in a step.
    pub count: usize,
    /// Their total time in the last step.
    pub measured_s: f64,
    /// Their predicted total time; absent without a profile of this machine, and for waits.
    pub predicted_s: Option<f64>,
}

/// Bytes of one kind of memory on the fullest of the ranks that share a pipeline rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Held {
    /// Index of the pipeline rank.
    pub rank: u64,
    /// Kind of memory.
    pub name: &'static str,
    /// Bytes counted during the run.
    pub measured_bytes: u64,
    /// Bytes predicted.
    pub predicted_bytes: u64,
}

/// The report as one HTML document that opens offline.
#[must_use]
pub fn report(run: &RunReport<'_>) -> String {
    let title = format!(
        "{} trained on {} ranks · vescale-plan",
        run.model, run.ranks
    );
    let header = html! {
        p.eyebrow { "vescale-plan run" }
        h1 { (run.model) " " span.on { "on " (run.ranks) " ranks" } }
    };
    let main = html! {
        (verdict(run))
        (losses(run.losses))
        (timelines(run))
        (phases(run.phases))
        (memory(run.memory))
    };
    let footer = format!("vescale-plan {} · this file is self-contained", run.version);
    let script = html! { (charts()) (script()) };
    document(&title, &header, &main, &footer, &script)
}

fn verdict(run: &RunReport<'_>) -> Markup {
    let differ = run.memory.iter();
    let differ = differ.filter(|m| m.measured_bytes != m.predicted_bytes);
    let differ = differ.count();
    let error = run.predicted_step_time.map(|p| p.0 / run.step_time.0 - 1.0);
    html! {
        section #verdict class=(format!("hero {}", rating(error))) {
            p.verdict {
                @match error {
                    Some(error) => {
                        strong { (format!("{:+.1} %", error * 100.0)) }
                        " predicted step time over measured"
                    }
                    None => { strong { (format::seconds(run.step_time)) } " a step" }
                }
                small { (run.losses.len()) " steps" }
            }
            dl.figures {
                div { dt { "Step, measured" } dd { (format::seconds(run.step_time)) } }
                @if let Some(predicted) = run.predicted_step_time {
                    div { dt { "Step, predicted" } dd { (format::seconds(predicted)) } }
                }
                div { dt { "Tokens per second" } dd { (format::count(run.tokens_per_s as u64)) } }
                div {
                    dt { "Bytes predicted exactly" }
                    dd { (run.memory.len() - differ) " of " (run.memory.len()) }
                }
            }
            div.plan {
                code { (run.strategy) }
                button type="button" data-copy=(run.strategy) { "Copy plan" }
            }
            @if error.is_none() {
                p.where {
                    "Step time is not predicted: this machine was not measured for this plan. "
                    code { "vescale-plan profile PLAN" }
                    " measures it; the next run then shows the prediction beside the measurement."
                }
            }
        }
    }
}

/// Relative errors up to this count as a good prediction.
const GOOD: f64 = 0.10;
/// Relative errors above this mean that the run was not what was predicted.
const BAD: f64 = 0.25;

/// CSS class that colours the verdict.
fn rating(error: Option<f64>) -> &'static str {
    match error.map(f64::abs) {
        None => "plain",
        Some(error) if error <= GOOD => "fits",
        Some(error) if error <= BAD => "off",
        // An error that is NaN is not good either.
        Some(_) => "too-large",
    }
}

/// Rows of the table of losses: the first and the last are always among them.
const LOSSES: usize = 12;

/// Chart of the loss over steps, and a table of some of them.
fn losses(losses: &[f64]) -> Markup {
    let every = losses.len().div_ceil(LOSSES).max(1);
    let last = losses.len().saturating_sub(1);
    let listed = losses.iter().enumerate();
    let listed = listed.filter(|(step, _)| step % every == 0 || *step == last);
    let body = html! {
        div #loss-chart role="img" aria-label="Loss by step; the table below lists steps" {}
        script #loss-data type="application/json" { (PreEscaped(script_safe(&json!(losses)))) }
        details {
            summary { "Losses of steps" }
            table.plain {
                (heads(&["step", "#loss"]))
                tbody {
                    @for (step, loss) in listed {
                        tr { td { (step) } td.num { (format!("{loss:.4}")) } }
                    }
                }
            }
        }
    };
    frame("loss", "Loss", "Mean over the tokens of every step.", &body)
}

fn memory(memory: &[Held]) -> Markup {
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Table of memory" { table.legend {
            tr { th { "rank" } th { "kind" } th.num { "counted" } th.num { "predicted" } }
            @for held in memory {
                tr {
                    td { "pp" (held.rank) }
                    td { (held.name) }
                    td.num { (format::bytes(Bytes(held.measured_bytes))) }
                    td.num {
                        @if held.measured_bytes == held.predicted_bytes { "equal" }
                        @else { (format::bytes(Bytes(held.predicted_bytes))) }
                    }
                }
            }
        } }
    };
    let lead = "Bytes of every pipeline rank's heaviest peer; equal means to the byte.";
    frame("memory", "Memory", lead, &body)
}

fn timelines(run: &RunReport<'_>) -> Markup {
    let end = |t: &Timeline| t.events.iter().fold(0.0, |end, e| e.end.0.max(end));
    let longest = run.predicted.map_or(0.0, end).max(end(run.measured));
    let both = run.predicted.into_iter().chain([run.measured]);
    let drawn: Vec<&str> = both.flat_map(|t| t.events.iter().map(colour)).collect();
    let body = html! {
        p.where { "Measured, the last step" }
        (drawing(run.measured, longest))
        @if let Some(predicted) = run.predicted {
            p.where { "Predicted" }
            (drawing(predicted, longest))
        }
        p.note.key {
            @for (name, colour) in KINDS.iter().filter(|(_, colour)| drawn.contains(colour)) {
                span { span.swatch style=(format!("background:var({colour})")) {} (name) }
            }
        }
    };
    let lead = "One row per pipeline rank, on the same scale.";
    frame("timeline", "Timeline", lead, &body)
}

/// Kinds of actions and their colours.
const KINDS: [(&str, &str); 6] = [
    ("forward", "--g-f"),
    ("backward", "--g-b"),
    ("towards inputs", "--g-i"),
    ("towards weights", "--g-w"),
    ("optimizer", "--g-opt"),
    ("communication", "--g-comm"),
];

fn colour(event: &Event) -> &'static str {
    let kind = match event.action.kind.name() {
        _ if event.stream != Stream::Compute => 5,
        "F" => 0,
        "I" => 2,
        "W" => 3,
        "optimizer" => 4,
        _ => 1,
    };
    KINDS[kind].1
}

fn drawing(timeline: &Timeline, longest: f64) -> Markup {
    let height = ROW * f64::from(timeline.ranks);
    let scale = (WIDTH - 40.0) / longest.max(1e-12);
    let mut events: Vec<&Event> = timeline.events.iter().collect();
    events.sort_by(|a, b| a.start.0.total_cmp(&b.start.0));
    events.truncate(MAX_EVENTS);
    html! {
        div.scroll tabindex="0" role="region" aria-label="Drawing of the timeline" { svg.plot viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="timeline" {
            @for rank in 0..timeline.ranks {
                text x="0" y=(format!("{:.1}", ROW * (f64::from(rank) + 0.65))) { "pp" (rank) }
            }
            @for event in events {
                @let thin = event.stream != Stream::Compute;
                @let top = ROW * f64::from(event.rank) + if thin { 16.0 } else { 1.0 };
                rect
                    x=(format!("{:.2}", 40.0 + event.start.0 * scale))
                    y=(format!("{top:.1}"))
                    width=(format!("{:.2}", ((event.end - event.start).0 * scale).max(0.3)))
                    height=(if thin { "4" } else { "14" })
                    fill=(format!("var({})", colour(event)))
                {
                    title { (event.action) ": " (format::seconds(event.end - event.start)) }
                }
            }
        } }
    }
}

fn phases(phases: &[Phase]) -> Markup {
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Table of actions" { table.legend {
            tr {
                th { "rank" } th { "action" } th.num { "times" }
                th.num { "measured" } th.num { "predicted" } th.num { "error" }
            }
            @for phase in phases {
                tr {
                    td { "pp" (phase.rank) }
                    td { (action(&phase.name)) }
                    td.num { (phase.count) }
                    td.num { (format::seconds(Seconds(phase.measured_s))) }
                    @match phase.predicted_s {
                        Some(predicted) => {
                            td.num { (format::seconds(Seconds(predicted))) }
                            td.num { (format!("{:+.0} %", (predicted / phase.measured_s - 1.0) * 100.0)) }
                        }
                        None => { td.num { "–" } td.num {} }
                    }
                }
            }
        } }
    };
    let lead = "Sums over the last step of every pipeline rank's first peer; waiting is not predicted by itself.";
    frame("phases", "By action", lead, &body)
}

/// An action as people call it.
fn action(name: &str) -> String {
    let whole = match name {
        "F" => "forward",
        "B" => "backward",
        "I" => "backward for inputs",
        "W" => "backward for weights",
        other => other,
    };
    let message = |verb: &str, what: &str| format!("{verb} {what} to another stage");
    match name.split_once(' ') {
        Some(("send", "F")) => message("send", "activations"),
        Some(("send", _)) => message("send", "gradients"),
        Some(("recv", "F")) => "receive activations from another stage".to_owned(),
        Some(("recv", _)) => "receive gradients from another stage".to_owned(),
        _ => whole.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plans::{Action, ActionKind};

    #[test]
    fn a_large_error_is_not_green() {
        for (error, class) in [
            (None, "plain"),
            (Some(0.0), "fits"),
            (Some(-0.1), "fits"),
            (Some(0.2), "off"),
            (Some(-0.2), "off"),
            (Some(-0.889), "too-large"),
            (Some(9.0), "too-large"),
            (Some(f64::NAN), "too-large"),
        ] {
            assert_eq!(rating(error), class);
        }
    }

    #[test]
    fn the_page_says_what_was_measured_and_predicted() {
        let event = Event {
            rank: 0,
            stream: Stream::Compute,
            action: Action {
                kind: ActionKind::F,
                stage: 0,
                micro_batch: 0,
            },
            start: Seconds(0.0),
            end: Seconds(0.25),
        };
        let timeline = Timeline {
            ranks: 1,
            events: vec![event],
            memory: Vec::new(),
        };
        let page = report(&RunReport {
            model: "gpt <tiny>",
            strategy: "tp1",
            ranks: 1,
            losses: &[4.0, 3.5, 3.0],
            step_time: Seconds(0.5),
            predicted_step_time: Some(Seconds(0.55)),
            tokens_per_s: 2048.0,
            phases: &[Phase {
                rank: 0,
                name: "F".to_owned(),
                count: 1,
                measured_s: 0.25,
                predicted_s: Some(0.2),
            }],
            memory: &[Held {
                rank: 0,
                name: "parameters",
                measured_bytes: 2048,
                predicted_bytes: 2048,
            }],
            measured: &timeline,
            predicted: Some(&timeline),
            version: "0.1.0",
        });
        for text in [
            "+10.0 %",
            "hero off",
            "1 of 1",
            "-20 %",
            "equal",
            "gpt &lt;tiny&gt;",
            "2,048",
        ] {
            assert!(page.contains(text), "{text}");
        }
    }
}
