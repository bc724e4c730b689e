//! The commands that launch the plan, for each training system that runs it.

use maud::{Markup, html};

use super::page::section as frame;
use crate::input::{Launch, ReportInput};

/// Commands to copy; empty for a plan that does not fit, or that no system takes.
pub(super) fn section(input: &ReportInput) -> Markup {
    let Some((first, others)) = input.launches.split_first() else {
        return html! {};
    };
    if !input.prediction.fit.fits() {
        return html! {};
    }
    let body = html! {
        (commands(first))
        @if !others.is_empty() {
            details {
                summary { "Other training systems: " (names(others)) }
                @for launch in others { (commands(launch)) }
            }
        }
    };
    let lead = "The first command writes the system's own configuration and a script, which says what it leaves open; the \
                second starts it.";
    frame("launch", "Launch it", lead, &body)
}

fn names(launches: &[Launch]) -> String {
    let names: Vec<&str> = launches.iter().map(|l| l.target.as_str()).collect();
    names.join(", ")
}

fn commands(launch: &Launch) -> Markup {
    let all = launch.commands.join("\n");
    html! {
        h3 { (launch.target) }
        div.plan {
            pre { code { (all) } }
            button type="button" data-copy=(all) { "Copy for " (launch.target) }
        }
    }
}
