//! The report: one HTML file that opens offline, decision first.
//!
//! One module per section, each a function from the input to markup. Style and script are
//! inlined; nothing is fetched. Colours of the parts of a step are CSS variables named after the
//! part (`--c-compute`), so light and dark themes live in one place.

mod alternatives;
mod breakdown;
mod gantt;
mod inputs;
mod memory;
mod memory_timeline;
mod pareto;
mod provenance;
pub mod run;
mod space;
mod verdict;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::input::ReportInput;

const STYLE: &str = include_str!("assets/report.css");
const SCRIPT: &str = include_str!("assets/report.js");

/// The whole report as one HTML document.
#[must_use]
pub fn report(input: &ReportInput) -> String {
    let title = format!("{} on {} · vescale-plan", input.model, input.devices);
    let footer = format!(
        "vescale-plan {} · a prediction, made without running anything · this file is self-contained",
        input.version
    );
    let script = html! {
        div #tip role="tooltip" hidden {}
        script { (PreEscaped(SCRIPT)) }
    };
    document(&title, &masthead(input), &sections(input), &footer, &script)
}

/// A page that opens offline.
fn document(title: &str, header: &Markup, main: &Markup, footer: &str, script: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                // Browsers ask for a favicon unless the page brings one.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body {
                header.page { (header) }
                main { (main) }
                footer { (footer) }
                (script)
            }
        }
    };
    page.into_string()
}

fn masthead(input: &ReportInput) -> Markup {
    html! {
        p.eyebrow { "vescale-plan" }
        h1 { (input.model) " " span.on { "on " (input.devices) } }
    }
}

fn sections(input: &ReportInput) -> Markup {
    html! {
        (verdict::section(input))
        div.two {
            (breakdown::section(input.prediction))
            (memory::by_rank(input))
        }
        (alternatives::section(input))
        (pareto::section(input))
        (gantt::section(input))
        (memory_timeline::section(input))
        div.two {
            (memory::parts(input.prediction))
            (breakdown::kernels(input.prediction))
        }
        (space::section(input))
        (inputs::section(input))
        (provenance::section(input.prediction))
    }
}

/// A section with a heading and one sentence that says what it shows.
fn section(id: &str, title: &str, lead: &str, body: &Markup) -> Markup {
    html! {
        section id=(id) {
            h2 { (title) }
            @if !lead.is_empty() { p.lead { (lead) } }
            (body)
        }
    }
}
