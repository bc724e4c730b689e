//! Answers on a terminal: what fits, how fast it is, where time and memory go, and what to do next.

use catalog::{Adapters, Bytes, Documents, Pools, Runtime, Seconds};
use plans::grammar::written;
use plans::{Candidate, Decisions, Fit, Prediction, SearchOutcome};

use crate::format;
use crate::groups::{self, Group};
pub use crate::lines::{Shade, Style, of};
use crate::words;

/// The context in which a prediction is shown.
#[derive(Clone, Copy, Debug)]
pub struct Ground<'a> {
    /// The training system. A strategy's text gives its overlap only where it is not this system's.
    pub runtime: &'a Runtime,
    /// Number of GPUs in a node.
    pub gpus_per_node: u64,
    /// Adapters that are trained in place of the weights.
    pub adapters: Option<Adapters>,
    /// The pools of the cluster, if not all of its nodes are alike.
    pub pools: Option<&'a Pools>,
    /// Documents that sequences are made of; `None` if each is one.
    pub documents: Option<&'a Documents>,
    /// The groups of replicas of the best plan; empty if all of its replicas are alike.
    pub groups: &'a [Group<'a>],
}

/// The result of a search.
#[must_use]
pub fn search(outcome: &SearchOutcome, ground: Ground<'_>, style: Style) -> String {
    let mut text = String::new();
    if let Some(best) = outcome.top.first() {
        if outcome.interrupted {
            let said = "Interrupted: the best plan that was found until then.";
            text.push_str(&format!("{}\n", style.paint(Shade::Careful, said)));
        }
        text.push_str(&best_plan(best, ground, style));
        if outcome.top.len() > 1 {
            text.push_str(&style.heading("Alternatives"));
            let others = &outcome.top[1..];
            text.push_str(&candidates(others, 2, best, ground.runtime, style));
        }
        for (wish, plan) in plans::by_plan(&outcome.wishes) {
            let one = std::slice::from_ref(plan);
            text.push_str(&style.heading(&wish));
            text.push_str(&candidates(one, 1, best, ground.runtime, style));
        }
    } else {
        let why = match outcome.interrupted {
            true => "Interrupted before a plan was found that fits.",
            false => "No plan fits.",
        };
        text.push_str(&format!("{}\n", style.paint(Shade::Bad, why)));
        for line in &outcome.relax {
            text.push_str(&style.paragraph("  ", &line.says));
        }
    }
    text.push_str(&space(outcome, style));
    text
}

/// The best plan of a search: its prediction, and that of its groups of replicas if not all are alike.
#[must_use]
pub fn best_plan(best: &Candidate, ground: Ground<'_>, style: Style) -> String {
    match ground.groups {
        [] => prediction(&best.strategy, &best.prediction, ground, style),
        groups => prediction_of_groups(groups, &best.prediction, ground, style),
    }
}

fn space(outcome: &SearchOutcome, style: Style) -> String {
    let s = &outcome.space;
    let [all, simulated, too_large] = [s.strategies, s.simulated, s.too_large].map(format::count);
    let mut text = format!("{all} strategies: {simulated} simulated");
    if s.too_large > 0 {
        text.push_str(&format!(" ({too_large} of them too large)"));
    }
    for (reason, &count) in &s.pruned {
        text.push_str(&format!(", {} ruled out by {reason}", format::count(count)));
    }
    let mut shown = format!("\n{}", style.paragraph("", &text));
    let mut illegal: Vec<(&String, &u64)> = s.illegal.iter().collect();
    illegal.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    if !illegal.is_empty() {
        let list: Vec<String> = illegal
            .iter()
            .take(4)
            .map(|&(rule, &count)| format!("{rule} ({})", format::count(count)))
            .collect();
        let text = format!("not in the space: {}", list.join(", "));
        shown.push_str(&style.paragraph("", &text));
    }
    shown
}

/// One strategy's prediction: verdict, plan, time, memory and their parts.
#[must_use]
pub fn prediction(
    strategy: &Decisions,
    p: &Prediction,
    ground: Ground<'_>,
    style: Style,
) -> String {
    let strategy_text = written(strategy, ground.runtime);
    let mut text = verdict(p, style) + &style.painted(Shade::Strong, "", &strategy_text);
    let said = words::plan(strategy, ground.gpus_per_node).join("; ");
    text.push_str(&style.paragraph("  ", &said));
    if let Some(pools) = ground.pools {
        let said = words::pools(pools, strategy);
        text.push_str(&style.paragraph("  ", &said));
    }
    text + &figures_and_parts(p, &[], ground, style)
}

/// The prediction of groups of replicas side by side: verdict, the plan of each group, time, memory and their parts.
#[must_use]
pub fn prediction_of_groups(
    groups: &[Group<'_>],
    p: &Prediction,
    ground: Ground<'_>,
    style: Style,
) -> String {
    let plans = groups::lines(groups, ground.runtime, style);
    verdict(p, style) + &plans + &figures_and_parts(p, groups, ground, style)
}

fn figures_and_parts(
    p: &Prediction,
    groups: &[Group<'_>],
    ground: Ground<'_>,
    style: Style,
) -> String {
    let mut text = String::new();
    if let Some(adapters) = &ground.adapters {
        let said = words::adapters(adapters);
        text.push_str(&style.paragraph("  ", &said));
    }
    if let Some(documents) = ground.documents {
        let said = words::documents(documents);
        text.push_str(&style.paragraph("  ", &said));
    }
    text.push('\n');
    text.push_str(&style.pairs(&figures(p, groups)));
    text.push('\n');
    text.push_str(&style.paragraph("  ", &format!("80% intervals, {}", p.evidence)));
    for warning in words::warnings(p) {
        text.push_str(&style.painted(Shade::Careful, "  warning: ", &warning));
    }
    text.push_str(&style.heading("Step time"));
    text.push_str(&style.bars(&breakdown(p)));
    text.push_str(&style.heading("Memory of the heaviest rank"));
    text.push_str(&style.bars(&memory(p)));
    let alike = ground.pools.is_none() && groups.is_empty();
    if let Some(host) = words::host_memory(p.host_memory, alike) {
        text.push_str(&style.paragraph("  ", &format!("and {host}")));
    }
    text
}

/// Whether it fits, and if not by how much.
fn verdict(p: &Prediction, style: Style) -> String {
    let [peak, usable] = [p.peak_memory, p.usable()].map(format::bytes);
    let needs = format!("{peak} of {usable}");
    let chance = format!("fits with probability {}", format::probability(p.p_fits));
    match &p.fit {
        Fit::Fits { .. } => {
            format!("{}  {needs}; {chance}\n", style.paint(Shade::Good, "FITS"))
        }
        Fit::TooLarge { over, largest } => {
            let by = format!(
                "{} too large; the largest part is {largest}",
                format::bytes(*over)
            );
            let word = style.paint(Shade::Bad, "DOES NOT FIT");
            format!("{word}  {needs}; {chance}\n{}", style.paragraph("  ", &by))
        }
    }
}

fn figures(p: &Prediction, groups: &[Group<'_>]) -> [(&'static str, String); 4] {
    let (soonest, latest) = p.step_time_interval;
    let (least, most) = p.peak_memory_interval;
    let time = format::seconds(p.step_time);
    let between = format::seconds_between(p.step_time, soonest, latest);
    let rate = format::significant(p.tokens_per_s_per_gpu);
    let palm = p.mfu_palm_beside().map_or_else(String::new, |palm| {
        let palm = of(palm);
        format!(", causal attention counted once ({palm} by the PaLM convention)")
    });
    let (mfu, peak) = (of(p.mfu), format::flop_rate(p.peak_flop_rate));
    let memory = format::bytes(p.peak_memory);
    let range = format::bytes_between(p.peak_memory, least, most);
    let rank = groups::rank(groups, p.peak_rank);
    let moment = words::moment(&p.peak_moment);
    [
        ("step time", format!("{time} ({between})")),
        ("throughput", format!("{rate} tokens/s/GPU")),
        ("MFU", format!("{mfu} of {peak} dense{palm}")),
        ("memory", format!("{memory} ({range}) on {rank}, {moment}")),
    ]
}

fn breakdown(p: &Prediction) -> Vec<(String, String, f64)> {
    let b = &p.breakdown;
    let parts = [
        ("compute", b.compute_s),
        ("recomputation", b.recompute_s),
        ("exposed TP", b.tp_exposed_s),
        ("exposed CP", b.cp_exposed_s),
        ("exposed EP", b.ep_exposed_s),
        ("exposed DP", b.dp_exposed_s),
        ("exposed PP", b.pp_exposed_s),
        ("bubble", b.bubble_s),
        ("optimizer", b.optimizer_s),
        ("exposed offload", b.offload_exposed_s),
        ("host", b.host_s),
        ("longer sequences", b.imbalance_s),
        ("slow ranks", b.stragglers_s),
        ("gradients between pools", b.pools_exposed_s),
    ];
    let shown = parts.into_iter().filter(|(_, s)| *s > 1e-6);
    let row = |(name, s): (&str, f64)| {
        (
            name.to_owned(),
            format::seconds(Seconds(s)),
            s / p.step_time.0,
        )
    };
    shown.map(row).collect()
}

fn memory(p: &Prediction) -> Vec<(String, String, f64)> {
    let mut saved = 0;
    let mut rows: Vec<(String, u64)> = Vec::new();
    for item in &p.memory {
        if item.name.starts_with("saved activations") {
            saved += item.bytes;
        } else {
            rows.push((item.name.clone(), item.bytes));
        }
    }
    rows.push(("saved activations".to_owned(), saved));
    rows.retain(|(_, bytes)| *bytes > 0);
    rows.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let total = p.peak_memory.as_f64();
    let row =
        |(name, bytes): (String, u64)| (name, format::bytes(Bytes(bytes)), bytes as f64 / total);
    rows.into_iter().map(row).collect()
}

/// Kernels and collectives that take most time.
#[must_use]
pub fn kernels(p: &Prediction, most: usize, style: Style) -> String {
    let row = |k: &plans::NamedTime| {
        (
            k.name.clone(),
            format::seconds(Seconds(k.seconds)),
            k.seconds / p.step_time.0,
        )
    };
    let rows: Vec<(String, String, f64)> = p.kernels.iter().take(most).map(row).collect();
    let heading = style.heading("Kernels and collectives of the busiest rank");
    heading + &style.bars(&rows)
}

/// Candidates, numbered from `from`. Each is compared with `other`: by step time, and by setting in bold the words of
/// its strategy that `other` does not have.
#[must_use]
pub fn candidates(
    list: &[Candidate],
    from: usize,
    other: &Candidate,
    runtime: &Runtime,
    style: Style,
) -> String {
    let mut text = String::new();
    let first = other.prediction.step_time;
    let known = written(&other.strategy, runtime);
    let known: Vec<&str> = known.split_whitespace().collect();
    let new = |line: &str| -> String {
        let words = line
            .split(' ')
            .map(|word| match word.is_empty() || known.contains(&word) {
                true => word.to_owned(),
                false => style.paint(Shade::Strong, word),
            });
        words.collect::<Vec<_>>().join(" ")
    };
    for (index, c) in list.iter().enumerate() {
        let p = &c.prediction;
        let change = format::signed((p.step_time.0 / first.0 - 1.0) * 100.0);
        let (time, memory) = (format::seconds(p.step_time), format::bytes(p.peak_memory));
        let number = from + index;
        text.push_str(&format!(
            "  {number:>2}. {time:>9}  {change:>6}%  {memory:>9}\n"
        ));
        let strategy = style.paragraph("      ", &written(&c.strategy, runtime));
        text.extend(strategy.lines().map(|line| new(line) + "\n"));
        let (shade, why) = match p.fit.fits() {
            true => (Shade::Faint, c.why_not_first.as_str()),
            false => (Shade::Bad, "does not fit"),
        };
        text.push_str(&style.painted(shade, "      ", why));
    }
    text
}

/// What to do next: for each purpose the commands, ready to copy.
#[must_use]
pub fn next(steps: &[(impl std::fmt::Display, Vec<String>)], style: Style) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let mut text = style.heading("Next");
    for (purpose, commands) in steps {
        text.push_str(&format!("  {purpose}\n"));
        for command in commands {
            text.push_str(&style.command(command));
        }
    }
    text
}

/// A table with a header whose cells never wrap.
#[must_use]
pub fn plain(header: &[&str], rows: &[Vec<String>]) -> String {
    let style = Style {
        width: usize::from(u16::MAX),
        colour: false,
    };
    style.columns(header, rows)
}

/// The section that says what abbreviations mean.
#[must_use]
pub fn terms(style: Style) -> String {
    let rows = words::TERMS.map(|(name, meaning)| (name, meaning.to_owned()));
    style.heading("Terms") + &style.pairs(&rows)
}
