//! The report of a search in which nothing fits: it says what would fit.

use maud::{Markup, html};
use plans::SpaceReport;

use super::page::{document, masthead, prose, script, section as frame};
use super::verdict::sentence;
use super::{inputs, space};
use crate::input::InputFact;

/// A search without a result.
#[derive(Clone, Debug)]
pub struct Nothing<'a> {
    /// Model, as named by the user.
    pub model: &'a str,
    /// Devices, such as `8 × h100-sxm`.
    pub devices: &'a str,
    /// What would fit, one sentence each.
    pub relax: Vec<&'a str>,
    /// Commands to try next, each with its purpose.
    pub next: &'a [(&'a str, String)],
    /// How many strategies of the search space were simulated or left out.
    pub space: &'a SpaceReport,
    /// Every input and where its value came from.
    pub inputs: &'a [InputFact],
    /// The command that searches again.
    pub command: &'a str,
    /// Version of the tool.
    pub version: &'a str,
}

/// The report as one HTML document that opens offline.
#[must_use]
pub fn report(nothing: &Nothing<'_>) -> String {
    let title = format!(
        "{} on {}: nothing fits · vescale-plan",
        nothing.model, nothing.devices
    );
    let main = html! {
        (verdict(nothing))
        (space::of(nothing.space))
        (inputs::of(nothing.inputs, nothing.command))
    };
    let footer = format!(
        "vescale-plan {} · this file is self-contained",
        nothing.version
    );
    document(
        &title,
        &masthead(nothing.model, nothing.devices),
        &main,
        &footer,
        &script(),
    )
}

fn verdict(nothing: &Nothing<'_>) -> Markup {
    let next = html! {
        @for (purpose, command) in nothing.next {
            h3 { (purpose) }
            div.plan {
                pre { code { (command) } }
                button type="button" data-copy=(command) { "Copy" }
            }
        }
    };
    html! {
        section #verdict .hero .too-large aria-label="Verdict" {
            p.verdict { strong { "No plan fits" } }
            ul.said { @for line in &nothing.relax { li { (prose(&sentence(line))) } } }
        }
        (frame("next", "What to try", "", &next))
    }
}
