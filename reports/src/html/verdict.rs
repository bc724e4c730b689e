//! The first screen: does it fit, how fast is it, what is the plan in words, what would make it better.

use catalog::Seconds;
use maud::{Markup, html};
use plans::{Fit, Prediction};

use super::alternatives;
use super::page::prose;
use crate::format;
use crate::groups::{Group, rank, sequences};
use crate::input::{Budget, ReportInput};
use crate::words;

/// Verdict, key figures, and the plan as a person says it; `groups` are those of replicas that differ.
pub(super) fn section(input: &ReportInput, groups: &[Group<'_>]) -> Markup {
    html! {
        section #verdict .hero .fits[input.prediction.fit.fits()]
            .too-large[!input.prediction.fit.fits()] aria-label="Verdict" {
            (verdict(input, groups))
            dl.figures { (figures(input)) }
            (plan(input, groups))
            (sentences(input))
            @if let Some(change) = &input.next_change {
                p.next { b { "Best next change: " } (prose(change)) }
            }
        }
    }
}

fn verdict(input: &ReportInput, groups: &[Group<'_>]) -> Markup {
    let prediction = input.prediction;
    let (word, detail) = match &prediction.fit {
        Fit::Fits { spare } => ("Fits", format!("With {} to spare", format::bytes(*spare))),
        Fit::TooLarge { over, largest } => {
            let over = format::bytes(*over);
            let by = format!("Too large by {over}; the largest part is {largest}");
            ("Too large", by)
        }
    };
    let (low, high) = prediction.peak_memory_interval;
    html! {
        p.verdict {
            strong { (word) }
            " "
            span {
                (format::gib(prediction.peak_memory)) " of " (format::gib(prediction.usable())) " GiB"
            }
            small { (format::gib(low)) " – " (format::gib(high)) " GiB" }
        }
        @if !prediction.fit.fits() { p.too-much { (detail) "." } }
        p.where {
            @if prediction.fit.fits() { (detail) ". " }
            "It fits with probability " b { (format::probability(prediction.p_fits)) }
            ". Memory is fullest on " (rank(groups, prediction.peak_rank)) ", "
            (words::moment(&prediction.peak_moment)) ". Usable is "
            (format::bytes(input.capacity)) " less " (format::percent(input.headroom))
            " headroom."
            @let alike = input.pools.is_none() && groups.is_empty();
            @if let Some(host) = words::host_memory(prediction.host_memory, alike) { " It takes " (host) "." }
        }
    }
}

fn figures(input: &ReportInput) -> Markup {
    let p = input.prediction;
    let (low, high) = p.step_time_interval;
    let all = p.tokens_per_s_per_gpu * input.gpus as f64;
    html! {
        (figure("Step time", &format::seconds(p.step_time),
            &format::seconds_between(p.step_time, low, high)))
        (figure("Tokens/s", &format::short_count(all),
            &format!("{} per GPU", format::significant(p.tokens_per_s_per_gpu))))
        (figure("MFU", &format::percent(p.mfu), &mfu_note(p)))
        // A plan that does not fit cannot run: it has neither time nor cost.
        @if let Some(budget) = input.budget.as_ref().filter(|_| p.fit.fits()) {
            (budget_figures(budget))
        }
    }
}

/// A note on the MFU: its peak, and the other convention's figure if that differs.
fn mfu_note(p: &Prediction) -> String {
    let peak = format!("of {} dense", format::flop_rate(p.peak_flop_rate));
    match p.mfu_palm_beside() {
        Some(palm) => format!(
            "{peak}; causal attention counted once ({} by the PaLM convention)",
            format::percent(palm)
        ),
        None => peak,
    }
}

fn budget_figures(budget: &Budget) -> Markup {
    let tokens = format!("for {} tokens", format::short_count(budget.tokens));
    let tokens = match budget.goodput {
        Some(share) => format!("{tokens}, goodput {}", format::percent(share)),
        None => tokens,
    };
    html! {
        (figure("Training time", &format::duration(budget.time), &tokens))
        @if let (Some(dollars), Some(price)) = (budget.dollars, budget.price) {
            (figure("Cost", &format::dollars(dollars), &format!("at $ {price} per GPU-hour")))
        }
    }
}

fn figure(name: &str, value: &str, note: &str) -> Markup {
    html! {
        div {
            dt { (name) }
            dd { (value) small { (note) } }
        }
    }
}

fn plan(input: &ReportInput, groups: &[Group<'_>]) -> Markup {
    html! {
        @if groups.is_empty() {
            ul.said {
                @let pools = input.pools.map(|pools| words::pools(pools, input.decisions));
                @for part in words::plan(input.decisions, input.gpus_per_node).into_iter().chain(pools) {
                    li { (sentence(&part)) }
                }
            }
        } @else {
            @let all = sequences(groups);
            @for (number, group) in (1..).zip(groups) {
                ul.said {
                    li { b { "Group " (number) ": " } (group.said(all)) "." }
                    @for part in group.plan() { li { (sentence(&part)) } }
                }
            }
        }
        div.plan {
            code #plan-line { (input.strategy) }
            button type="button" data-copy=(input.strategy) { "Copy plan" }
            button type="button" data-copy=(input.command) { "Copy command" }
        }
        p.where {
            "Plan " code { (input.plan_id) } " · " (input.runtime.name) " on " (input.cluster)
        }
    }
}

/// A phrase with a capital letter and a stop.
pub(super) fn sentence(text: &str) -> String {
    format!("{}.", capitalised(text))
}

/// A phrase with a capital letter.
pub(super) fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|c| c.to_uppercase().to_string());
    format!("{}{}", first.unwrap_or_default(), letters.as_str())
}

/// A name with only its first letter in lower case, for use inside a sentence.
fn uncapitalised(name: &str) -> String {
    let (first, rest) = name.split_at(name.chars().next().map_or(0, char::len_utf8));
    first.to_lowercase() + rest
}

/// What limits the plan, the runner-up, how many published runs resemble it, and what to be careful about.
fn sentences(input: &ReportInput) -> Markup {
    let p = input.prediction;
    let loss = format::largest_loss(&p.breakdown);
    let next = input.alternatives.get(1);
    html! {
        ul.sentences {
            @if let Some((name, time)) = loss {
                li {
                    "Largest loss: " b { (uncapitalised(name)) } ", "
                    (format::seconds(Seconds(time))) " ("
                    (format::percent(time / p.step_time.0)) " of the step)."
                }
            }
            @if let Some(next) = next {
                li {
                    (if input.space.is_some() { "Runner-up: " } else { "Fastest change of one decision: " }) code { (alternatives::new_words(&next.strategy, &input.strategy)) }
                    " — " (next.why_not_first) "."
                }
            }
            li { "80 % intervals, " (p.evidence) "." }
            @for warning in words::warnings(p) {
                li.careful { (prose(&sentence(&warning))) }
            }
        }
    }
}
