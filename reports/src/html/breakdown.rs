//! Where the step time goes: one stacked bar, its legend, and the kernels behind it.

use catalog::Seconds;
use maud::{Markup, html};
use plans::Prediction;

use super::page::{Bar, bars, section as frame};
use crate::format;

/// Kernels beyond this many are summed: the list is for reading, the JSON has them all.
const KERNELS: usize = 12;

/// The stacked bar of the slowest rank's step.
pub(super) fn section(prediction: &Prediction) -> Markup {
    let total = prediction.step_time.0;
    let parts = format::breakdown_parts(&prediction.breakdown);
    let shown = parts.iter().filter(|(_, _, time)| *time > 0.0);
    let body = html! {
        (stack(prediction))
        table.legend {
            @for (key, name, time) in shown {
                tr {
                    td { i.swatch style=(format!("background:var(--c-{key})")) {} (name) }
                    td.num { (format::seconds(Seconds(*time))) }
                    td.num { (format::percent(time / total)) }
                }
            }
        }
    };
    frame("time", "Step time", "The slowest rank, end to end.", &body)
}

/// The stacked bar of a step's parts.
pub(super) fn stack(prediction: &Prediction) -> Markup {
    let total = prediction.step_time.0;
    let parts = format::breakdown_parts(&prediction.breakdown);
    html! {
        div.stack role="img" aria-label="parts of the step time" {
            @for (key, name, time) in parts.iter().filter(|(_, _, time)| *time > 0.0) {
                span style=(format!("flex-grow:{:.6};background:var(--c-{key})", time / total))
                    data-tip=(tip(name, *time, total)) {}
            }
        }
    }
}

/// Table of kernels and collectives by name, longest first.
pub(super) fn kernels(prediction: &Prediction) -> Markup {
    let total = prediction.step_time.0;
    let all = prediction.kernels.iter();
    let all: Vec<Bar<'_>> = all.map(|k| (&k.name[..], None, k.seconds)).collect();
    let body = bars(&all, KERNELS, |time| {
        let share = format::percent(time / total);
        [format::seconds(Seconds(time)), share]
    });
    let lead = "Time per step on the busiest rank. A message counts for the time by which it delays kernels: while they wait \
                for it, or run slower beside it. Messages between pipeline stages and of data parallelism are not listed.";
    frame("kernels", "Kernels and collectives", lead, &body)
}

fn tip(name: &str, time: f64, total: f64) -> String {
    let time_text = format::seconds(Seconds(time));
    format!("{name}: {time_text}, {}", format::percent(time / total))
}
