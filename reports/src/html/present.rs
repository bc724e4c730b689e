//! The strategy that the team trains with now: how far it is from the plan, and what single changes gain.

use catalog::Seconds;
use maud::{Markup, html};
use plans::grammar::written;
use plans::present::{Change, Present};

use super::page::{heads, section as frame};
use crate::format;
use crate::input::ReportInput;
use crate::present::{NOT_OF_GROUPS, distance, elsewhere, error, remark, share};

/// The section; empty if no strategy in use was compared.
pub(super) fn section(input: &ReportInput) -> Markup {
    let Some(present) = input.present else {
        return html! {};
    };
    let strategy = written(&present.candidate.strategy, input.runtime);
    let changes = present.by_decision();
    let body = html! {
        @if present.groups().is_empty() {
            p { code { (strategy) } }
        }
        @for (number, group) in (1..).zip(present.groups()) {
            p { "group " (number) ": " (group) }
        }
        p {
            "A step takes " (format::seconds(present.candidate.prediction.step_time))
            " now. This plan: " (distance(present, input.prediction.step_time)) "."
        }
        @if let Some(elsewhere) = elsewhere(present) {
            p { (elsewhere) }
        }
        h3 { "What one change gains" }
        @match present.groups() {
            [] => (table(present, &changes)),
            _ => p { (NOT_OF_GROUPS) },
        }
        @if present.path.len() > 1 {
            h3 { "To this plan, one change after another" }
            (table(present, &present.path.iter().collect::<Vec<_>>()))
        }
    };
    let lead = format!(
        "For each decision, the best change of it alone; differences in step time below {} are within the error of such comparisons.",
        error(present)
    );
    frame("present", "From the present strategy", &lead, &body)
}

fn table(present: &Present, changes: &[&Change]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Table of changes" {
            table {
                (heads(&["#Change of step", "#Step", "#Memory", "What changes", "To know"]))
                tbody { @for change in changes { (line(present, change)) } }
            }
        }
    }
}

fn line(present: &Present, change: &Change) -> Markup {
    let gain = present.gain(change.step_time).0;
    let sign = if gain > 0.0 { "−" } else { "+" };
    html! {
        tr {
            td.num {
                (sign) (format::seconds(Seconds(gain.abs())))
                " (" (share(present, change).replace('-', "−")) ")"
            }
            td.num { (format::seconds(change.step_time)) }
            td.num .over[!change.fits] { (format::gib(change.peak_memory)) " GiB" }
            td {
                code { (change.words) }
                @if change.changes_results { " (changes results)" }
            }
            td.why { (remark(present, change).1) }
        }
    }
}
