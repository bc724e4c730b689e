//! The HTML report: one file, no requests, decision first.

mod charts;
mod gantt;
mod sections;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use plans::{Candidate, SpaceReport, Timeline};
use spec::Bytes;

/// What a report shows.
#[derive(Clone, Debug)]
pub struct ReportInput<'a> {
    /// Model and devices.
    pub title: String,
    /// What was planned for.
    pub inputs: Vec<(String, String)>,
    /// Content hash of the plan.
    pub plan_id: String,
    /// The plan.
    pub best: &'a Candidate,
    /// The best ones, the plan first.
    pub top: &'a [Candidate],
    /// How the space was disposed of.
    pub space: Option<&'a SpaceReport>,
    /// The predicted step.
    pub timeline: &'a Timeline,
    /// Memory that a plan may use.
    pub capacity: Bytes,
    /// Memory of the device.
    pub device_memory: Bytes,
    /// Tokens, days and dollars of a training.
    pub budget: Option<(f64, f64, Option<f64>)>,
}

/// The report as text.
#[must_use]
pub fn report(input: &ReportInput<'_>) -> String {
    page(input).into_string()
}

fn page(input: &ReportInput<'_>) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                link rel="icon" href="data:,";
                title { (input.title) " · vescale-plan" }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                main {
                    (sections::verdict(input))
                    (charts::time(input))
                    (charts::memory(input))
                    (sections::alternatives(input))
                    (charts::pareto(input))
                    (gantt::section(input))
                    (charts::memory_timeline(input))
                    (sections::space(input))
                    (sections::tables(input))
                    (sections::provenance(input))
                }
                script { (PreEscaped(include_str!("report.js"))) }
            }
        }
    }
}

/// GiB with one digit.
fn gib(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / 1024f64.powi(3))
}
