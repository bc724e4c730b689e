//! Every constant that entered the prediction, with its evidence.

use catalog::Origin;
use catalog::names::shown;
use maud::{Markup, html};
use plans::{Prediction, UsedConstant};

use super::page::section as frame;

/// The sortable table of constants.
pub(super) fn section(prediction: &Prediction) -> Markup {
    if prediction.provenance.is_empty() {
        return html! {};
    }
    let body = html! {
        details {
            summary { (prediction.provenance.len()) " constants" }
            div.scroll tabindex="0" role="region" aria-label="Constants" {
                table.sortable {
                    thead {
                        tr {
                            @for name in ["Constant", "Value", "Evidence", "Source"] {
                                th scope="col" aria-sort="none" { button type="button" { (name) } }
                            }
                        }
                    }
                    tbody { @for constant in &prediction.provenance { (row(constant)) } }
                }
            }
        }
    };
    let lead =
        "Each number that the prediction rests on: value, kind of evidence, where it is from.";
    frame("provenance", "Provenance", lead, &body)
}

fn row(constant: &UsedConstant) -> Markup {
    let (strength, word) = evidence(constant.origin);
    html! {
        tr {
            td { (constant.name) }
            td { code { (constant.value) } }
            td data-value=(strength) { span.evidence .{ "e-" (word) } { (word) } }
            td.why { (shown(constant.source.trim_end())) }
        }
    }
}

/// Rank of the evidence, strongest first, and its name.
fn evidence(origin: Origin) -> (u8, &'static str) {
    match origin {
        Origin::Measured => (0, "measured"),
        Origin::Datasheet => (1, "datasheet"),
        Origin::Published => (2, "published"),
        Origin::Fitted => (3, "fitted"),
        Origin::Assumed => (4, "assumed"),
    }
}
