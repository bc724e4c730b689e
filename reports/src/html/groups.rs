//! Groups of replicas side by side: what each does, and charts of the slowest.

use maud::{Markup, html};

use super::page::{heads, section as frame};
use super::{gantt, memory_timeline, ranks};
use crate::format;
use crate::groups::{Group, sequences};
use crate::input::ReportInput;

/// The table of groups; empty if all replicas are alike.
pub(super) fn section(groups: &[Group<'_>]) -> Markup {
    if groups.is_empty() {
        return html! {};
    }
    let all = sequences(groups);
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Table of the groups of replicas" {
            table #groups .plain {
                (heads(&["Group", "GPUs", "#Sequences", "#Replicas", "#Micro-batches", "#Step alone", "#Memory"]))
                tbody {
                    @for (number, group) in (1..).zip(groups) {
                        @let p = group.prediction;
                        tr {
                            th scope="row" { (number) }
                            td { (group.devices) }
                            td.num { (format::count(group.sequences)) " of " (format::count(all)) }
                            td.num { (format::count(group.strategy.dp())) }
                            td.num {
                                (format::count(group.strategy.num_micro_batches)) " × "
                                (group.strategy.micro_batch)
                            }
                            td.num { (format::seconds(p.step_time)) }
                            td.num { (format::bytes(p.peak_memory)) " of " (format::bytes(p.usable())) }
                        }
                    }
                }
            }
        }
    };
    let lead = "Each group trains on its share of the batch under a plan of its own; then all add up their gradients.";
    frame("groups-of-replicas", "Groups of replicas", lead, &body)
}

/// The pipeline, memory over time and ranks of one group, the slowest.
pub(super) fn of_slowest(number: usize, input: &ReportInput) -> Markup {
    html! {
        h2.part { "Group " (number) ", the slowest: " (input.devices) }
        (gantt::section(input))
        (memory_timeline::section(input))
        (ranks::section(input))
    }
}
