//! Terminal text of `search --from`: how much slower the user's present strategy is than the best plan, what each single
//! change to it would gain, and which changes lead to the best plan.

use catalog::{Runtime, Seconds, elementary};
use plans::Candidate;
use plans::grammar::written;
use plans::present::{Change, Present};

use crate::format;
use crate::lines::{Shade, Style, of};

/// The parameters for showing a strategy in use.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// The strategy with its changes.
    pub present: &'a Present,
    /// The best plan, if any fits.
    pub best: Option<&'a Candidate>,
    /// Decisions that no change may touch.
    pub kept: &'a [String],
    /// The training system; a strategy's text leaves out overlap that is this system's own.
    pub runtime: &'a Runtime,
}

/// The strategy in use, the best single change, all that gain, and the path to the best plan.
#[must_use]
pub fn section(shown: Shown<'_>, style: Style) -> String {
    let Shown { present, .. } = shown;
    let p = &present.candidate.prediction;
    let mut text = format!("{}\n", style.paint(Shade::Strong, "Present strategy"));
    match present.groups() {
        [] => {
            let strategy = written(&present.candidate.strategy, shown.runtime);
            text.push_str(&style.paragraph("  ", &strategy));
        }
        groups => {
            for (number, group) in (1..).zip(groups) {
                text.push_str(&style.paragraph("  ", &format!("group {number}: {group}")));
            }
        }
    }
    let fits = match present.fits {
        true => String::new(),
        false => ", less than was asked for".to_owned(),
    };
    let memory = format!(
        "{} of {}; fits with probability {}{fits}",
        format::bytes(p.peak_memory),
        format::bytes(p.usable()),
        format::probability(p.p_fits)
    );
    let mut rows = vec![
        ("step time", format::seconds(p.step_time)),
        ("memory", memory),
    ];
    if let Some(on) = &present.on_pools {
        rows.push(("GPUs", on.devices.clone()));
    }
    let best = shown.best.map(|best| best.prediction.step_time);
    rows.extend(best.map(|best| ("best plan", distance(present, best))));
    if !shown.kept.is_empty() {
        rows.push(("kept", shown.kept.join(", ")));
    }
    text.push_str(&style.pairs(&rows));
    if let Some(elsewhere) = elsewhere(present) {
        text.push_str(&style.paragraph("  ", &elsewhere));
    }
    text.push_str(&single(present, style));
    if present.path.len() > 1 {
        text.push_str(&style.heading("To the best plan, one change after another"));
        text.push_str(&columns(style));
        for change in &present.path {
            text.push_str(&row(present, change, style));
        }
    }
    text
}

/// Text in place of single changes, where groups of replicas differ.
pub const NOT_OF_GROUPS: &str = "Not looked for: where groups of replicas differ, a change of one group changes which share of \
                                 the batch is best for each.";

/// A sentence that single changes do not lead to the best plan; `None` if they do, or without one.
#[must_use]
pub fn elsewhere(present: &Present) -> Option<String> {
    let on = present.best_elsewhere()?;
    let where_it_is = match on.contains(" | ") {
        true => format!("has groups of replicas side by side on {on}"),
        false => format!("is on {on}"),
    };
    let stay = match present.groups() {
        [] => ", and the changes below stay on the GPUs of the present strategy",
        _ => "",
    };
    Some(format!(
        "The best plan {where_it_is}: no changes of single decisions lead there{stay}."
    ))
}

/// How far the best plan is, in words.
#[must_use]
pub fn distance(present: &Present, best: Seconds) -> String {
    if present.path.is_empty() && present.best_elsewhere().is_none() {
        return "the present strategy is the best plan".to_owned();
    }
    let gain = present.gain(best).0;
    let change = match gain > 0.0 {
        true => "less",
        false => "more",
    };
    let error = error(present);
    let against = match (present.fits, present.within_error(best)) {
        (false, _) => "it fits with the probability that was asked for".to_owned(),
        (true, true) => format!("within the error of such comparisons ({error})"),
        (true, false) => format!("more than the error of such comparisons ({error})"),
    };
    format!(
        "{}, {} ({}) {change}: {against}",
        format::seconds(best),
        format::seconds(Seconds(gain.abs())),
        of(present.share(best).abs())
    )
}

/// The error of comparing two plans, as a share.
#[must_use]
pub fn error(present: &Present) -> String {
    of(elementary::exp_m1(present.error))
}

/// The best single change, then those of other decisions that gain, then the decisions that have none.
fn single(present: &Present, style: Style) -> String {
    let mut text = style.heading("Best single change");
    if !present.groups().is_empty() {
        return text + &style.paragraph("  ", NOT_OF_GROUPS);
    }
    let Some(best) = present.best_change() else {
        let none = match present.fits {
            true => "None: no strategy one decision away is faster.",
            false => "None: no strategy one decision away fits.",
        };
        return text + &style.paragraph("  ", none);
    };
    text.push_str(&columns(style));
    text.push_str(&row(present, best, style));
    let helps =
        |change: &Change| change.fits && (!present.fits || present.gain(change.step_time).0 > 0.0);
    let all = present.by_decision();
    let (helping, rest): (Vec<&Change>, Vec<&Change>) =
        all.into_iter().partition(|change| helps(change));
    if helping.len() > 1 {
        let heading = match present.fits {
            true => "What one other change would gain",
            false => "Other single changes that fit",
        };
        text.push_str(&style.heading(heading));
        for change in &helping[1..] {
            text.push_str(&row(present, change, style));
        }
    }
    let (slower, larger): (Vec<&Change>, Vec<&Change>) =
        rest.into_iter().partition(|change| change.fits);
    for (what, changes) in [("no faster alone", slower), ("would not fit", larger)] {
        if !changes.is_empty() {
            let names: Vec<&str> = changes.iter().map(|change| change.decision).collect();
            let line = format!("{what}: {}", names.join("; "));
            text.push_str(&style.paragraph("  ", &line));
        }
    }
    text
}

/// The header above the figures of changes.
fn columns(style: Style) -> String {
    let names = format!("  {:>18}  {:>9}  {:>9}", "change of step", "step", "memory");
    format!("{}\n", style.paint(Shade::Faint, &names))
}

/// The share of a step that a change gains or loses, with a minus where it gains.
#[must_use]
pub fn share(present: &Present, change: &Change) -> String {
    let share = of(present.share(change.step_time).abs());
    match (
        share.starts_with('<'),
        present.gain(change.step_time).0 > 0.0,
    ) {
        (true, _) => share,
        (false, true) => format!("-{share}"),
        (false, false) => format!("+{share}"),
    }
}

/// One change: its effect on the step time, step time and memory after it, and what changes.
fn row(present: &Present, change: &Change, style: Style) -> String {
    let gain = present.gain(change.step_time).0;
    let sign = if gain > 0.0 { '-' } else { '+' };
    let figures = format!(
        "{:>9}  {:>7}  {:>9}  {:>9}",
        format!("{sign}{}", format::seconds(Seconds(gain.abs()))),
        share(present, change),
        format::seconds(change.step_time),
        format::bytes(change.peak_memory),
    );
    let (shade, note) = remark(present, change);
    let line = format!("  {figures}  {}", style.paint(shade, note));
    let results = match change.changes_results {
        true => " (changes results)",
        false => "",
    };
    let words = style.paragraph("      ", &format!("{}{results}", change.words));
    format!("{}\n{words}", line.trim_end())
}

/// A remark on a change: it does not fit, or is within the error of comparisons.
#[must_use]
pub fn remark(present: &Present, change: &Change) -> (Shade, &'static str) {
    match (change.fits, present.within_error(change.step_time)) {
        (false, _) => (Shade::Bad, "does not fit"),
        (true, true) => (Shade::Faint, "within the error"),
        (true, false) => (Shade::Good, ""),
    }
}
