//! Every input and where its value came from.

use maud::{Markup, html};

use super::page::section as frame;
use crate::input::ReportInput;

/// Table of names, values and origins.
pub(super) fn section(input: &ReportInput) -> Markup {
    let body = html! {
        table.legend {
            @for fact in &input.inputs {
                tr {
                    td { (fact.name) }
                    td { code { (fact.value) } }
                    td.note { (fact.origin) }
                }
            }
        }
        p.note { "The same prediction again: " code.command { (input.command) } }
    };
    let lead =
        "Every value and where it was said: asked for, taken by default, or read from a file.";
    frame("inputs", "Inputs", lead, &body)
}
