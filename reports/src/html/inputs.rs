//! Every input and where it was said.

use maud::{Markup, html};

use super::section as frame;
use crate::input::ReportInput;

/// Names, values, origins.
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
    let lead = "What was asked and what was taken by default.";
    frame("inputs", "Inputs", lead, &body)
}
