//! What happened to every strategy of the space: simulated, pruned by a bound, or not legal.

use std::collections::BTreeMap;

use maud::{Markup, html};
use plans::SpaceReport;

use super::page::section as frame;
use crate::format;
use crate::input::ReportInput;

/// How many strategies were simulated and ruled out, with reasons; empty when there was no search.
pub(super) fn section(input: &ReportInput) -> Markup {
    input.space.map_or_else(|| html! {}, of)
}

/// How many strategies were simulated and ruled out, with reasons.
pub(super) fn of(space: &SpaceReport) -> Markup {
    let pruned: u64 = space.pruned.values().sum();
    let lead = format!(
        "{} legal strategies: {} simulated ({} of them too large), {} removed by a proven bound.",
        format::count(space.strategies),
        format::count(space.simulated),
        format::count(space.too_large),
        format::count(pruned)
    );
    let body = html! {
        div.two {
            (reasons("Removed by a proven bound", &space.pruned))
            (reasons("Not in the space", &space.illegal))
        }
    };
    frame("space", "What was rejected, and why", &lead, &body)
}

fn reasons(title: &str, counts: &BTreeMap<String, u64>) -> Markup {
    let mut rows: Vec<(&String, &u64)> = counts.iter().collect();
    // Stable sort: equal counts stay in the map's alphabetical order.
    rows.sort_by(|a, b| b.1.cmp(a.1));
    html! {
        div {
            h3 { (title) }
            table.legend {
                @for (reason, count) in rows {
                    tr { td { (reason) } td.num { (format::count(*count)) } }
                }
                @if counts.is_empty() { tr { td.note { "none" } } }
            }
        }
    }
}
