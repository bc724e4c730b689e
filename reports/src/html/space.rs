//! What happened to every strategy of the space: simulated, pruned by a bound, or not legal.

use std::collections::BTreeMap;

use maud::{Markup, html};
use plans::SpaceReport;

use super::page::{heads, section as frame};
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

/// The ways to use the pools of the cluster; empty if all of its nodes are alike, or there was no search.
pub(super) fn ways(input: &ReportInput) -> Markup {
    if input.ways.is_empty() {
        return html! {};
    }
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Table of the ways to use the pools" {
            table.plain {
                (heads(&["Pools", "Step"]))
                tbody { @for (pools, result) in input.ways { tr { td { (pools) } td { (result) } } } }
            }
        }
    };
    let lead = "A pipeline passes through pools that are joined by +; pools separated by | have groups of replicas of their own.";
    frame("ways", "Ways to use the pools", lead, &body)
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
