//! The HTML report of a plan.

use std::path::Path;

use catalog::paths::beside;
use costmodel::{Scenario, Score};
use interop::config::escape;
use plans::{Candidate, PlanFile, Present, SpaceReport, Strategy, Timeline};
use reports::{Alternative, InputFact, Launch, Point, ReportInput};

use crate::budget::{Budget, Training};
use crate::error::AnswerError;
use crate::launch::{self, Launchable};
use crate::next_change;
use crate::opened::Opened;
use crate::origins::{self, Asked};
use crate::together::{self, Together};

/// The inputs of a report.
pub struct ReportSource<'a> {
    /// The inputs, with where each came from.
    pub inputs: Vec<InputFact>,
    /// The model's name.
    pub model: &'a str,
    /// The model as an argument of a command run here.
    pub model_arg: &'a str,
    /// The cluster as an argument of a command run here.
    pub cluster_arg: &'a str,
    /// The scenario that was planned for.
    pub scenario: &'a Scenario,
    /// The plan file.
    pub plan: &'a PlanFile,
    /// The plan, predicted.
    pub best: &'a Candidate,
    /// Plans to show, this one first.
    pub top: &'a [Candidate],
    /// Plans that are best by another measure than step time, each with that measure in words, such as `least memory`.
    pub wishes: &'a [(String, Candidate)],
    /// Strategies spread over the searched space.
    pub sampled: &'a [(Strategy, Score)],
    /// How many strategies were simulated and how many left out, after a search.
    pub space: Option<&'a SpaceReport>,
    /// The searched ways to use the pools, each with its step time or why it has no plan.
    pub ways: Vec<(&'a str, String)>,
    /// The predicted timeline of a step.
    pub timeline: &'a Timeline,
    /// Days and dollars of the whole training, if asked for.
    pub budget: Option<Budget>,
    /// Path of the plan file.
    pub plan_path: &'a str,
    /// The command that writes the plan to that path, if it is not written yet.
    pub keep: Option<String>,
    /// The strategy in use, if the plan was compared with one.
    pub present: Option<&'a Present>,
    /// The single change that would gain most, in words.
    pub next_change: Option<String>,
}

/// Number of strategies one decision away that a report shows.
const NEIGHBOURS: usize = 9;

/// The report of a plan that was read from `path`, with the days and dollars of a training.
///
/// # Errors
/// When a strategy cannot be priced.
pub fn of_plan(plan: &Opened, path: &Path, training: Training) -> Result<String, AnswerError> {
    let Opened {
        file,
        costs,
        strategy,
        inputs,
        scenario,
    } = plan;
    let near = planner::nearby::best_of_each(costs, strategy)?;
    let best = Candidate::alone(strategy.clone(), costs.predict(strategy)?);
    let asked = Asked::in_plan(file.headroom.is_some());
    let rate = best.prediction.tokens_per_s_per_gpu;
    Ok(html(&ReportSource {
        inputs: origins::rows(inputs, &asked),
        model: &inputs.model,
        model_arg: &beside(path, &file.model),
        cluster_arg: &beside(path, &file.cluster),
        scenario,
        plan: file,
        best: &best,
        top: &shown_beside(&best, &near),
        wishes: &[],
        sampled: &[],
        space: None,
        ways: Vec::new(),
        timeline: &costs.timeline(strategy)?,
        budget: training.budget(scenario, inputs.gpus, strategy, rate),
        plan_path: &path.display().to_string(),
        keep: None,
        present: None,
        next_change: next_change::best(costs, strategy, &best.prediction, &near)?,
    }))
}

/// A strategy and those one decision away that fit at its own risk, as a report shows them.
pub fn shown_beside(best: &Candidate, near: &[Candidate]) -> Vec<Candidate> {
    let risk = planner::nearby::risk_of(&best.prediction);
    let fitting = near.iter().filter(|c| c.prediction.may_choose(risk));
    let all = std::iter::once(best).chain(fitting.take(NEIGHBOURS));
    all.cloned().collect()
}

/// The inputs of a report on groups of replicas side by side.
pub struct OfGroups<'a> {
    /// The groups.
    pub together: &'a Together,
    /// The plan file of all of them.
    pub plan: &'a PlanFile,
    /// Path of the plan file.
    pub plan_path: &'a str,
    /// The inputs, with where each came from.
    pub inputs: Vec<InputFact>,
    /// How many strategies were simulated and how many left out, after a search.
    pub space: Option<&'a SpaceReport>,
    /// The searched ways to use the pools, each with its step time or why it has no plan.
    pub ways: Vec<(&'a str, String)>,
    /// Days and dollars of the whole training, if asked for.
    pub budget: Option<Budget>,
    /// The command that finds the plan again.
    pub command: String,
    /// The strategy in use, if one was compared with the plan.
    pub present: Option<&'a Present>,
}

/// The report of a plan of several groups of replicas that was read from `path`.
///
/// # Errors
/// When a group cannot be priced.
pub fn of_plan_of_groups(
    file: &PlanFile,
    together: &Together,
    path: &Path,
    training: Training,
) -> Result<String, AnswerError> {
    let inputs = &together.inputs;
    let rate = together.prediction.tokens_per_s_per_gpu;
    let first = &together.parts[0].strategy;
    let command = format!("vescale-plan search {}", launch::flags(inputs));
    of_groups(&OfGroups {
        together,
        plan: file,
        plan_path: &path.display().to_string(),
        inputs: origins::rows(&inputs.json, &Asked::in_plan(file.headroom.is_some())),
        space: None,
        ways: Vec::new(),
        budget: training.budget(&inputs.scenario, inputs.json.gpus, first, rate),
        command,
        present: None,
    })
}

/// The report of groups of replicas side by side, as HTML.
///
/// # Errors
/// When a group cannot be priced.
pub fn of_groups(of: &OfGroups<'_>) -> Result<String, AnswerError> {
    let together = of.together;
    let slowest = together.slowest();
    let whole = together.whole();
    let alone = Candidate::alone(slowest.strategy.clone(), slowest.prediction.clone());
    let timeline = slowest.costs.timeline(&slowest.strategy)?;
    let none = Timeline::default();
    let number = (together.parts.iter()).position(|part| std::ptr::eq(part, slowest));
    let source = |is_slowest: bool| {
        let inputs = match is_slowest {
            true => &slowest.inputs,
            false => &together.inputs,
        };
        ReportSource {
            inputs: of.inputs.clone(),
            model: &together.inputs.json.model,
            model_arg: &together.inputs.model_arg,
            cluster_arg: &together.inputs.cluster_arg,
            scenario: &inputs.scenario,
            plan: of.plan,
            best: if is_slowest { &alone } else { &whole },
            top: &[],
            wishes: &[],
            sampled: &[],
            space: of.space,
            ways: of.ways.clone(),
            timeline: if is_slowest { &timeline } else { &none },
            budget: of.budget,
            plan_path: of.plan_path,
            keep: None,
            present: of.present,
            next_change: None,
        }
    };
    let (whole, part) = (source(false), source(true));
    let mut input = page(&whole);
    let strategies = together.parts.iter();
    let runtime = &together.inputs.scenario.runtime;
    let strategies = strategies.map(|part| plans::grammar::written(&part.strategy, runtime));
    input.strategy = strategies.collect::<Vec<_>>().join(" | ");
    input.strategy_in_full.clone_from(&input.strategy);
    input.launches = Vec::new();
    input.command.clone_from(&of.command);
    input.capacity = together.capacity();
    let of_slowest = (number.unwrap_or_default() + 1, &page(&part));
    Ok(reports::html::report_of_groups(
        &input,
        &together.shown(),
        of_slowest,
    ))
}

/// The report as HTML.
pub fn html(source: &ReportSource<'_>) -> String {
    reports::html::report(&page(source))
}

/// The contents of a report's page.
fn page<'a>(source: &'a ReportSource<'_>) -> ReportInput<'a> {
    let cluster = &source.scenario.cluster;
    let runtime = &source.scenario.runtime;
    let alternative = |c: &Candidate| Alternative {
        strategy: plans::grammar::written(&c.strategy, runtime),
        step_time: c.prediction.step_time,
        tokens_per_s_per_gpu: c.prediction.tokens_per_s_per_gpu,
        mfu: c.prediction.mfu,
        peak_memory: c.prediction.peak_memory,
        fits: c.prediction.fit.fits(),
        why_not_first: c.why_not_first.clone(),
    };
    let gpus = source.scenario.workload.gpus;
    ReportInput {
        model: source.model.to_owned(),
        devices: cluster.devices(gpus),
        gpus,
        cluster: cluster.name.clone(),
        runtime,
        strategy: plans::grammar::written(&source.best.strategy, runtime),
        strategy_in_full: source.best.strategy.to_string(),
        decisions: source.best.strategy.decisions(),
        pools: cluster.pools.as_deref(),
        gpus_per_node: cluster.gpus_per_node,
        domain: cluster.domain(gpus),
        launches: launches(source),
        present: source.present,
        next_change: source.next_change.clone(),
        plan_id: source.plan.id.clone(),
        command: command(source),
        prediction: &source.best.prediction,
        timeline: Some(source.timeline),
        capacity: capacity(source),
        headroom: source.scenario.headroom,
        budget: source.budget.map(|b| reports::Budget {
            tokens: b.tokens,
            time: catalog::Seconds(b.days * 86400.0),
            price: b.price,
            dollars: b.dollars,
            goodput: b.failures.map(|lost| lost.goodput),
        }),
        alternatives: source.top.iter().map(alternative).collect(),
        wishes: plans::by_plan(source.wishes)
            .into_iter()
            .map(|(wish, plan)| (wish, alternative(plan)))
            .collect(),
        points: points(source),
        space: source.space,
        ways: &source.ways,
        inputs: source.inputs.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Memory capacity of a device of the heaviest rank.
fn capacity(source: &ReportSource<'_>) -> catalog::Bytes {
    let rank = source.best.prediction.peak_rank as usize;
    together::capacity(&source.scenario.cluster, &source.best.strategy, rank)
}

/// The strategies to draw, each once: those spread over the space, then the plan, its alternatives and the plans for other wishes.
fn points(source: &ReportSource<'_>) -> Vec<Point> {
    let point = |strategy: &Strategy, step_time, peak_memory, found| Point {
        decisions: strategy.decisions().clone(),
        step_time,
        peak_memory,
        found,
    };
    let mut listed: Vec<&Candidate> = Vec::new();
    let wished = source.wishes.iter().map(|(_, plan)| plan);
    for plan in source.top.iter().chain(wished) {
        if !listed.iter().any(|c| c.strategy == plan.strategy) {
            listed.push(plan);
        }
    }
    let is_listed = |strategy: &Strategy| listed.iter().any(|c| c.strategy == *strategy);
    let sampled = source.sampled.iter().filter(|(s, _)| !is_listed(s));
    // Peaks are scaled to the usable memory of the best plan's heaviest rank.
    let usable = source.best.prediction.usable();
    let sampled = sampled.map(|(s, score)| {
        let peak = score
            .peak_memory
            .as_share_of(usable, source.scenario.capacity());
        point(s, score.step_time, peak, false)
    });
    let found = listed.iter().map(|c| {
        let p = &c.prediction;
        let peak = p.peak_memory.as_share_of(usable, p.usable());
        point(&c.strategy, p.step_time, peak, true)
    });
    sampled.chain(found).collect()
}

/// Commands that launch the plan, one entry per target; if the plan is not written yet, each begins with writing it.
fn launches(source: &ReportSource<'_>) -> Vec<Launch> {
    let of = Launchable {
        scenario: source.scenario,
        strategy: &source.best.strategy,
        plan: source.plan_path,
    };
    let launch = |(target, commands): (String, Vec<String>)| Launch {
        target,
        commands: source.keep.iter().cloned().chain(commands).collect(),
    };
    launch::launches(of).into_iter().map(launch).collect()
}

/// The command that makes the same prediction again, with every input explicit.
fn command(source: &ReportSource<'_>) -> String {
    let w = &source.scenario.workload;
    let mut options = vec![
        ("model", source.model_arg.to_owned()),
        ("cluster", source.cluster_arg.to_owned()),
        ("runtime", source.scenario.runtime.name.clone()),
        ("gpus", w.gpus.to_string()),
        ("seq", w.seq_len.to_string()),
        ("global-batch", w.global_batch.to_string()),
        ("precision", w.precision.name().to_owned()),
        ("headroom", source.scenario.headroom.to_string()),
        (
            "strategy",
            plans::grammar::written(&source.best.strategy, &source.scenario.runtime),
        ),
    ];
    if let Some(of) = w.documents() {
        options.push(("lengths", of.lengths().to_string()));
        options.push(("packing", of.packing().to_string()));
    }
    let adapters = source.scenario.model.adapters;
    options.extend(adapters.map(|adapters| ("lora", adapters.to_string())));
    if let Some(budget) = source.budget {
        options.push(("tokens", budget.tokens.to_string()));
        options.extend(budget.price.map(|price| ("price", price.to_string())));
        options.extend(budget.failures.iter().flat_map(|lost| lost.flags(w.gpus)));
    }
    options.into_iter().fold(
        "vescale-plan estimate".to_owned(),
        |command, (name, value)| format!("{command} {}", escape::option(name, &value)),
    )
}
