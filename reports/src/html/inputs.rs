//! Every input and where its value came from.

use maud::{Markup, html};

use super::page::section as frame;
use crate::input::{InputFact, ReportInput};

/// Table of the inputs' names, values and origins, then the strategy with every decision.
pub(super) fn section(input: &ReportInput) -> Markup {
    html! {
        (of(&input.inputs, &input.command))
        (in_full(&input.strategy_in_full))
    }
}

fn in_full(strategy: &str) -> Markup {
    let body = html! {
        details {
            summary { "Every decision" }
            p { code.command { @for word in strategy.split_inclusive([',', '/']) { (word) wbr; } } }
        }
    };
    frame("strategy", "The strategy in full", "", &body)
}

/// Table of the inputs' names, values and origins, and the command.
pub(super) fn of(inputs: &[InputFact], command: &str) -> Markup {
    let body = html! {
        table.legend {
            @for fact in inputs {
                tr {
                    td { (fact.name) }
                    td { code { (fact.value) } }
                    td.note { (fact.origin) }
                }
            }
        }
        p.note { "The same prediction again: " code.command { (command) } }
    };
    let lead =
        "Every value and where it was said: asked for, taken by default, or read from a file.";
    frame("inputs", "Inputs", lead, &body)
}
