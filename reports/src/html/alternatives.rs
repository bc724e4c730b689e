//! Two tables of strategies: the fastest, sortable, each with the reason why it is not the first; and below it those that
//! are best by another measure than step time, such as least memory.

use maud::{Markup, html};

use super::page::{heads, section as frame};
use crate::format;
use crate::input::{Alternative, ReportInput};

/// The table of strategies; empty if there are none to list.
pub(super) fn section(input: &ReportInput) -> Markup {
    if input.alternatives.is_empty() {
        return html! {};
    }
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Table of alternatives" {
            table #alternatives .sortable {
                thead {
                    tr {
                        (column("#", true))
                        (column("Strategy", false))
                        (column("Step", true))
                        (column("Tokens/s/GPU", true))
                        (column("MFU", true))
                        (column("Memory", true))
                        (column(if input.space.is_some() { "Why not first" } else { "Against this plan" }, false))
                    }
                }
                tbody {
                    @for (index, row) in input.alternatives.iter().enumerate() {
                        (line(index, row, input))
                    }
                }
            }
        }
        (wishes(input))
    };
    let lead = "Choose a column to sort by it. What the first does not have is set in bold.";
    frame("top", "Alternatives", lead, &body)
}

/// The second table; empty if the first strategy is best by every measure.
fn wishes(input: &ReportInput) -> Markup {
    if input.wishes.is_empty() {
        return html! {};
    }
    html! {
        h3 { "For other wishes" }
        div.scroll tabindex="0" role="region" aria-label="Table of strategies for other wishes" {
            table #wishes .plain {
                (heads(&["Wish", "Strategy", "#Step", "#Memory", "Against the first"]))
                tbody {
                    @for (wish, row) in &input.wishes {
                        tr {
                            th scope="row" { (wish) }
                            td { code { (differences(&row.strategy, &input.strategy)) } }
                            td.num { (format::seconds(row.step_time)) }
                            td.num .over[!row.fits] { (format::gib(row.peak_memory)) " GiB" }
                            td.why { (row.why_not_first) }
                        }
                    }
                }
            }
        }
    }
}

fn column(name: &str, number: bool) -> Markup {
    html! {
        th scope="col" .num[number] aria-sort=(if name == "#" { "ascending" } else { "none" }) {
            button type="button" { (name) }
        }
    }
}

fn line(index: usize, row: &Alternative, input: &ReportInput) -> Markup {
    let first = &input.alternatives[0].strategy;
    let over = !row.fits;
    html! {
        tr .first[index == 0] {
            td.num data-value=(index) { (index + 1) }
            td { code { (differences(&row.strategy, first)) } }
            td.num data-value=(row.step_time.0) { (format::seconds(row.step_time)) }
            td.num data-value=(row.tokens_per_s_per_gpu) {
                (format::significant(row.tokens_per_s_per_gpu))
            }
            td.num data-value=(row.mfu) { (format::percent(row.mfu)) }
            td.num .over[over] data-value=(row.peak_memory.0) { (format::gib(row.peak_memory)) " GiB" }
            td.why { (row.why_not_first) }
        }
    }
}

/// The strategy's parts that the first strategy does not have; the whole strategy if it has no such part.
pub(super) fn new_words(strategy: &str, first: &str) -> String {
    let known: Vec<&str> = first.split_whitespace().collect();
    let new = strategy
        .split_whitespace()
        .filter(|part| !known.contains(part));
    let new: Vec<&str> = new.collect();
    if new.is_empty() {
        return strategy.to_owned();
    }
    format!("… {}", new.join(" "))
}

/// The strategy's parts, with those that differ from the first strategy's in bold.
fn differences(strategy: &str, first: &str) -> Markup {
    let known: Vec<&str> = first.split_whitespace().collect();
    html! {
        @for (index, part) in strategy.split_whitespace().enumerate() {
            @if index > 0 { " " }
            @if known.contains(&part) { (part) } @else { b { (part) } }
        }
    }
}
