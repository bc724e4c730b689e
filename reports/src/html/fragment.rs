//! Pieces of HTML for a notebook, which brings its own style.

use catalog::{Bytes, Seconds};
use maud::html;
use plans::PlanFile;

use crate::format;

/// A plan in a few rows.
#[must_use]
pub fn plan(plan: &PlanFile) -> String {
    let p = &plan.prediction;
    let w = &plan.workload;
    let own = [&plan.strategy_text];
    let groups = plan.groups.iter().map(|group| &group.strategy_text);
    let texts: Vec<&String> = match plan.groups.is_empty() {
        true => own.into_iter().collect(),
        false => groups.collect(),
    };
    let texts: Vec<String> = texts.iter().map(|text| text.replace(',', " ")).collect();
    let strategy = texts.join(" | ");
    let rows = [
        ("plan", plan.id.clone()),
        ("model", plan.model.clone()),
        ("GPUs", format!("{} of {}", w.gpus, plan.cluster)),
        ("runtime", plan.runtime.clone()),
        ("strategy", strategy),
        ("step time", format::seconds(Seconds(p.step_time_s))),
        ("peak memory", format::bytes(Bytes(p.peak_memory_bytes))),
        ("MFU", format::percent(p.mfu)),
    ];
    html! {
        table {
            @for (name, value) in rows {
                tr { th style="text-align: left" { (name) } td style="text-align: left" { (value) } }
            }
        }
    }
    .into_string()
}

/// Text as it is laid out.
#[must_use]
pub fn text(text: &str) -> String {
    html! { pre { (text) } }.into_string()
}
