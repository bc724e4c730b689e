//! The report of several plans side by side: aligned columns, what differs in bold.

use catalog::{Seconds, elementary};
use maud::{Markup, html};
use plans::Prediction;

use super::breakdown;
use super::page::{document, script, section as frame};
use super::verdict::capitalised;
use crate::format;
use crate::words;

/// What a plan is for, in one respect: a name, such as `cluster`, and a value.
pub type Fact = (&'static str, String);

/// One plan of a comparison.
#[derive(Clone, Debug)]
pub struct Compared<'a> {
    /// Path of the plan file.
    pub name: String,
    /// The job that it is for: model, devices and runtime.
    pub job: String,
    /// The same and more, fact by fact; all plans have the same facts.
    pub facts: Vec<Fact>,
    /// The strategy in the short form.
    pub strategy: String,
    /// The layout in phrases, without final stops.
    pub said: Vec<String>,
    /// The prediction for this plan.
    pub prediction: &'a Prediction,
    /// The pipeline rank that needs the most memory, in words.
    pub fullest: String,
}

/// The comparison as one HTML document that opens offline.
#[must_use]
pub fn report(plans: &[Compared<'_>], version: &str) -> String {
    let names: Vec<&str> = plans.iter().map(|p| p.name.as_str()).collect();
    let title = format!("{} · vescale-plan", names.join(" and "));
    let header = html! {
        p.eyebrow { "vescale-plan compare" }
        h1 { (plans.len()) " plans" }
    };
    let main = html! {
        (verdict(plans))
        (decisions(plans))
        (parts(plans))
    };
    let footer = format!("vescale-plan {version} · this file is self-contained");
    document(&title, &header, &main, &footer, &script())
}

/// Which plan is fastest of those that fit, and by how much.
fn verdict(plans: &[Compared<'_>]) -> Markup {
    let fitting = plans.iter().filter(|p| p.prediction.fit.fits());
    let rate = |p: &&Compared<'_>| p.prediction.tokens_per_s_per_gpu;
    let best = fitting.clone().max_by(|a, b| rate(a).total_cmp(&rate(b)));
    let others = fitting.filter(|p| best.is_some_and(|b| !std::ptr::eq(*p, b)));
    let second = others.max_by(|a, b| rate(a).total_cmp(&rate(b)));
    html! {
        section #verdict .hero .fits[best.is_some()] .too-large[best.is_none()] aria-label="Verdict" {
            @match (best, second) {
                (None, _) => { p.verdict { strong { "None fits" } } }
                (Some(best), None) => { p.verdict { strong { (best.name) } " is the only one that fits" } }
                (Some(best), Some(second)) => {
                    p.verdict {
                        strong { (best.name) }
                        (format!(" makes {:.1} % more tokens/s per GPU than ", (rate(&best) / rate(&second) - 1.0) * 100.0))
                        (second.name)
                    }
                    p.where {
                        @let differing = differing(&[best, second]);
                        @if !differing.is_empty() {
                            "They are plans for different jobs: the strategy is not all that differs, but also the "
                            (differing.join(", ")) "."
                        } @else if elementary::ln(rate(&best) / rate(&second)) <= best.prediction.ratio_error.max(second.prediction.ratio_error) {
                            "The difference is within the error of such comparisons."
                        } @else {
                            "The difference is larger than the error of such comparisons."
                        }
                    }
                }
            }
        }
    }
}

/// Names of the facts in which plans differ.
fn differing(plans: &[&Compared<'_>]) -> Vec<&'static str> {
    let facts = plans.first().map_or(&[][..], |first| &first.facts);
    let differs = |at: usize| plans.iter().any(|plan| plan.facts[at] != facts[at]);
    let names = facts.iter().enumerate();
    (names.filter(|(at, _)| differs(*at)))
        .map(|(_, (name, _))| *name)
        .collect()
}

fn decisions(plans: &[Compared<'_>]) -> Markup {
    let words = |p: &Compared<'_>| -> Vec<String> {
        p.strategy.split_whitespace().map(str::to_owned).collect()
    };
    let first = plans.first().map(words).unwrap_or_default();
    let body = html! {
        div.scroll tabindex="0" role="region" aria-label="Table of plans" {
            table.plain.aligned style=(wide(plans.len())) {
                thead { tr { th scope="col" { "Plan" } @for p in plans { th scope="col" { (p.name) } } } }
                tbody {
                    tr { th scope="row" { "For" } @for p in plans { td { (p.job) } } }
                    (jobs(plans))
                    tr { th scope="row" { "Strategy" }
                        @for p in plans {
                            td { code {
                                @for word in words(p) {
                                    @if first.contains(&word) { (word) } @else { b { (word) } } " "
                                }
                            } }
                        }
                    }
                    tr { th scope="row" { "In words" } @for p in plans { td { (p.said.join("; ")) } } }
                    (figures(plans))
                }
            }
        }
    };
    let lead = "Words of a strategy that the first does not have are bold.";
    frame("plans", "Plans", lead, &body)
}

/// Table rows of the facts that differ between plans, except model, devices and runtime.
fn jobs(plans: &[Compared<'_>]) -> Markup {
    let all: Vec<&Compared<'_>> = plans.iter().collect();
    let named = |name: &str| ["model", "devices", "runtime"].contains(&name);
    let rows = differing(&all).into_iter().filter(|name| !named(name));
    let value = |plan: &Compared<'_>, name: &str| {
        let fact = plan.facts.iter().find(|(known, _)| *known == name);
        fact.map(|(_, value)| value.clone()).unwrap_or_default()
    };
    html! {
        @for name in rows {
            tr { th scope="row" { (capitalised(name)) } @for p in plans { td { (value(p, name)) } } }
        }
    }
}

/// The least width of a table with a column for each plan.
fn wide(plans: usize) -> String {
    format!("min-width:{}rem", 8 + 9 * plans)
}

fn figures(plans: &[Compared<'_>]) -> Markup {
    let row = |name: &str, value: &dyn Fn(&Prediction) -> String| {
        html! {
            tr { th scope="row" { (name) } @for p in plans { td { (value(p.prediction)) } } }
        }
    };
    html! {
        (row("Fits", &|p| {
            let word = if p.fit.fits() { "yes" } else { "no" };
            format!("{word} (fits with probability {})", format::probability(p.p_fits))
        }))
        (row("Step time", &|p| {
            let (low, high) = p.step_time_interval;
            format!("{} ({})", format::seconds(p.step_time), format::seconds_between(p.step_time, low, high))
        }))
        (row("Tokens/s/GPU", &|p| format::significant(p.tokens_per_s_per_gpu)))
        (row("MFU", &|p| format::percent(p.mfu)))
        (row("Peak memory", &|p| {
            let (low, high) = p.peak_memory_interval;
            format!("{} ({})", format::bytes(p.peak_memory), format::bytes_between(p.peak_memory, low, high))
        }))
        tr { th scope="row" { "Fullest" }
            @for p in plans { td { (p.fullest) ", " (words::moment(&p.prediction.peak_moment)) } }
        }
        (row("Evidence", &|p| p.evidence.clone()))
    }
}

/// Where the step time of each plan goes: bars on one scale, and a table.
fn parts(plans: &[Compared<'_>]) -> Markup {
    let longest = plans.iter().map(|p| p.prediction.step_time.0);
    let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
    let all: Vec<_> = plans
        .iter()
        .map(|p| format::breakdown_parts(&p.prediction.breakdown))
        .collect();
    let rows = all
        .first()
        .map(|parts| parts.map(|(key, name, _)| (key, name)));
    let body = html! {
        @for p in plans {
            h3 { (p.name) }
            div style=(format!("width:{:.2}%", p.prediction.step_time.0 / longest * 100.0)) {
                (breakdown::stack(p.prediction))
            }
        }
        div.scroll tabindex="0" role="region" aria-label="Table of the parts of the step" {
            table.plain style=(wide(plans.len())) {
                thead { tr { th scope="col" { "Part" } @for p in plans { th.num scope="col" { (p.name) } } } }
                tbody {
                    @for (index, (key, name)) in rows.into_iter().flatten().enumerate() {
                        @if all.iter().any(|parts| parts[index].2 > 1e-6) {
                            tr {
                                td { i.swatch style=(format!("background:var(--c-{key})")) {} (name) }
                                @for parts in &all { td.num { (format::seconds(Seconds(parts[index].2))) } }
                            }
                        }
                    }
                }
            }
        }
    };
    frame(
        "time",
        "Where the step goes",
        "The slowest rank of each plan, on one scale.",
        &body,
    )
}
