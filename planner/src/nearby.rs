//! Strategies one decision away from a strategy, chosen from the search space.
//!
//! A decision is the size of an axis, with the ranks that it gains or loses taken from one other axis; or one of the
//! others: expert sizes, micro-batch, sequence parallelism, kind of context parallelism, schedule with virtual stages,
//! stages, recomputation, activations in host memory, sharding of states, types of gradients, optimizer states, depth of
//! prefetching, axis order, overlap, dispatcher of tokens, CUDA graphs, scales of 8-bit products. What has to follow from the changed decision (such
//! as the number of virtual stages when the pipeline changes) differs as little as the space allows.

use std::collections::BTreeMap;

use catalog::{Overlap, ScheduleKind, elementary};
use costmodel::{CostModel, Scenario};
use plans::grammar::changed_words;
use plans::present::{Change, same_results};
use plans::{Candidate, Decisions, EVEN, Prediction, Recompute, StagePartition, Strategy, Zero};
use rayon::prelude::*;

use crate::PlannerError;
use crate::choices::{ActivationChoice, PipelineChoice, ShardingChoice};
use crate::constraints::Constraints;
use crate::executions::adapted;
use crate::explain::why_not_first;
use crate::layouts::Layout;
use crate::options::{Objective, RISK, SearchOptions, limit, risk_to_take};
use crate::space::{SearchSpace, with_pipeline};

/// How far two strategies are apart: the number of decisions that differ, then by how much they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Apart {
    pub(crate) decisions: usize,
    amount: u64,
}

/// What values of different kinds differ by: more than any two sizes.
const UNLIKE: u64 = 1 << 20;

impl Apart {
    fn size(&mut self, a: u64, b: u64) {
        if a != b {
            let ratio = elementary::log2(a.max(1) as f64 / b.max(1) as f64).abs();
            self.decisions += 1;
            self.amount += (ratio * 1000.0) as u64;
        }
    }

    fn choice<T: PartialEq>(&mut self, a: T, b: T) {
        if a != b {
            self.decisions += 1;
            self.amount += UNLIKE;
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            decisions: self.decisions + other.decisions,
            amount: self.amount + other.amount,
        }
    }
}

/// How far two strategies are apart; 0 decisions only if they are the same job.
pub(crate) fn apart(a: &Decisions, b: &Decisions) -> Apart {
    let mut order = Apart::default();
    let of_order = |d: &Decisions| d.canonical().axis_order;
    order.choice(of_order(a), of_order(b));
    order.choice(a.overlap, b.overlap);
    order.choice(a.dispatcher, b.dispatcher);
    order.choice(a.graphs, b.graphs);
    order.choice(a.fp8_recipe, b.fp8_recipe);
    layouts(a, b)
        .and(pipelines(
            a,
            b.schedule,
            b.vpp,
            &b.stages,
            activations_of(b),
        ))
        .and(shardings(a, b))
        .and(order)
}

fn layouts(a: &Decisions, b: &Decisions) -> Apart {
    let mut apart = Apart::default();
    for (a, b) in [
        (a.tp, b.tp),
        (a.pp, b.pp),
        (a.cp, b.cp),
        (a.ep, b.ep),
        (a.etp, b.etp),
        (a.micro_batch, b.micro_batch),
    ] {
        apart.size(a, b);
    }
    if a.tp > 1 && b.tp > 1 {
        apart.choice(a.sequence_parallel, b.sequence_parallel);
    }
    if a.cp > 1 && b.cp > 1 {
        apart.choice(a.cp_kind, b.cp_kind);
    }
    apart
}

/// 1F1B and interleaved schedules are one kind: virtual stages tell them apart.
fn kind(schedule: ScheduleKind) -> ScheduleKind {
    match schedule {
        ScheduleKind::Interleaved => ScheduleKind::OneFOneB,
        other => other,
    }
}

fn pipelines(
    a: &Decisions,
    schedule: ScheduleKind,
    vpp: u64,
    stages: &StagePartition,
    activations: ActivationChoice,
) -> Apart {
    let mut order = Apart::default();
    order.size(a.vpp, vpp);
    order.choice(kind(a.schedule), kind(schedule));
    // Schedule and virtual stages are one decision.
    order.decisions = order.decisions.min(1);
    if a.stages.0.len() == stages.0.len() {
        order.choice(&a.stages, stages);
    } else if *stages != StagePartition::even(stages.layers(), stages.0.len() as u64) {
        order.amount += 1;
    }
    match (a.recompute, activations.recompute) {
        (Recompute::Layers(a), Recompute::Layers(b))
        | (Recompute::Falling(a), Recompute::Falling(b)) => order.size(a, b),
        (a, b) => order.choice(a, b),
    }
    match (a.offload_layers, activations.offload_layers) {
        (0, b) => order.choice(0, b),
        (a, 0) => order.choice(a, 0),
        (a, b) => order.size(a, b),
    }
    order
}

fn activations_of(d: &Decisions) -> ActivationChoice {
    ActivationChoice {
        recompute: d.recompute,
        offload_layers: d.offload_layers,
    }
}

fn shardings(a: &Decisions, b: &Decisions) -> Apart {
    let mut apart = Apart::default();
    apart.size(u64::from(u8::from(a.zero)), u64::from(u8::from(b.zero)));
    if a.zero == b.zero {
        apart.choice(a.reshard_after_forward, b.reshard_after_forward);
        if a.zero != Zero::Z0 {
            apart.size(a.dp_replicate, b.dp_replicate);
        }
    }
    apart.choice(a.gradients, b.gradients);
    apart.choice(a.optimizer_states, b.optimizer_states);
    apart.choice(a.offload, b.offload);
    apart.choice(a.canonical().prefetch, b.canonical().prefetch);
    apart
}

/// Of the strategies of a layout, the one that differs least from `to`; `None` if the layout has none.
fn nearest(space: &SearchSpace, layout: &Layout, to: &Decisions) -> Option<Decisions> {
    let base = Decisions {
        overlap: to.overlap,
        dispatcher: to.dispatcher,
        graphs: to.graphs,
        fp8_recipe: to.fp8_recipe,
        ..space.decisions(layout)
    };
    let pipelines_of = space.pipelines(layout);
    let all = pipelines_of
        .iter()
        .flat_map(|p| p.activations.iter().map(move |&of| (p, of)));
    let (pipeline, activations) =
        all.min_by_key(|(p, of)| pipelines(to, p.schedule, p.vpp, &p.stages, *of))?;
    let sharding = space.shardings(layout);
    let sharding = sharding
        .iter()
        .min_by_key(|s| shardings(to, &s.of(&base)))?;
    let orders = space.orders(layout);
    let order = orders.iter().find(|&&order| order == to.axis_order);
    Some(Decisions {
        axis_order: *order.or(orders.first())?,
        ..sharding.of(&with_pipeline(&base, pipeline, activations))
    })
}

/// The decisions in which a layout differs from a strategy, with their values in the layout. A change of the mesh is one
/// decision, as it moves two sizes at once (more TP means less DP); empty if it moves more than two. On the same mesh
/// every other decision that differs is listed.
fn changed(d: &Decisions, layout: &Layout) -> Vec<(&'static str, [u64; 4])> {
    let mesh = [layout.tp, layout.pp, layout.cp, layout.dp];
    let same = [d.tp, d.pp, d.cp, d.dp()];
    let moved: Vec<bool> = mesh.iter().zip(same).map(|(a, b)| *a != b).collect();
    let decision = match moved[..] {
        [false, false, false, false] => return beside_mesh(d, layout),
        [true, false, false, true] => "tp",
        [false, true, false, true] => "pp",
        [false, false, true, true] => "cp",
        [true, true, false, false] => "tp and pp",
        [true, false, true, false] => "tp and cp",
        [false, true, true, false] => "pp and cp",
        _ => return Vec::new(),
    };
    vec![(decision, mesh)]
}

fn beside_mesh(d: &Decisions, layout: &Layout) -> Vec<(&'static str, [u64; 4])> {
    let on = |sp: bool| u64::from(sp);
    let mut choices = vec![
        ("ep", layout.ep, d.ep),
        ("etp", layout.etp, d.etp),
        ("mbs", layout.micro_batch, d.micro_batch),
        ("sp", on(layout.sequence_parallel), on(d.sequence_parallel)),
    ];
    if d.cp > 1 {
        choices.push(("cp_kind", layout.cp_kind as u64, d.cp_kind as u64));
    }
    choices.retain(|(_, own, other)| own != other);
    let value = |(decision, own, _)| (decision, [own, 0, 0, 0]);
    choices.into_iter().map(value).collect()
}

/// All strategies that differ from `of` in one decision, each with the name of that decision. There is one strategy for
/// every other value that a decision may have.
pub(crate) fn strategies(
    scenario: &Scenario,
    constraints: &Constraints,
    of: &Strategy,
) -> Vec<(&'static str, Strategy)> {
    let space = SearchSpace::near(scenario, constraints, of);
    let mut chosen: BTreeMap<(&'static str, [u64; 4]), (Apart, &Layout)> = BTreeMap::new();
    let mut own: Option<(Apart, &Layout)> = None;
    for layout in space.layouts() {
        let distance = layouts(of, &space.decisions(layout));
        if layout.axes_unlike(of) == 0 && own.is_none_or(|(least, _)| distance < least) {
            own = Some((distance, layout));
        }
        for change in changed(of, layout) {
            let known = chosen.entry(change).or_insert((distance, layout));
            if distance < known.0 {
                *known = (distance, layout);
            }
        }
    }
    let mut found: Vec<(&'static str, Decisions)> = Vec::new();
    for ((decision, _), (_, layout)) in &chosen {
        found.extend(nearest(&space, layout, of).map(|d| (*decision, d)));
    }
    if let Some((_, layout)) = own
        && let Some(base) = nearest(&space, layout, of)
    {
        of_pipelines(&space.pipelines(layout)[..], &base, &mut found);
        of_shardings(space.shardings(layout), &base, &mut found);
        for &axis_order in space.orders(layout) {
            let base = base.clone();
            found.push(("order", Decisions { axis_order, ..base }));
        }
        of_executions(&space, layout, &base, (scenario, constraints), &mut found);
    }
    for (_, d) in &mut found {
        *d = adapted(d.clone(), scenario);
    }
    let same_job = of.canonical();
    let mut all: Vec<(&'static str, Strategy)> = Vec::new();
    for (decision, d) in found {
        let strategy = Strategy::new(d, &scenario.model, &scenario.workload);
        let new =
            |s: &Strategy| s.canonical() != same_job && !all.iter().any(|(_, known)| known == s);
        let strategy = strategy.ok().filter(new);
        all.extend(strategy.map(|s| (decision, s)));
    }
    all
}

/// Other ways to run the passes of the same pipeline, each in one decision, where constraints allow them.
fn of_executions(
    space: &SearchSpace,
    layout: &Layout,
    base: &Decisions,
    (scenario, constraints): (&Scenario, &Constraints),
    found: &mut Vec<(&'static str, Decisions)>,
) {
    let dispatched = space.dispatchers(layout).into_iter().map(|dispatcher| {
        let base = base.clone();
        ("dispatcher", Decisions { dispatcher, ..base })
    });
    let overlapped = overlaps(base, scenario).into_iter().map(|overlap| {
        let base = base.clone();
        ("overlap", Decisions { overlap, ..base })
    });
    let captured = space.graphs(layout).into_iter().map(|graphs| {
        let base = base.clone();
        ("graphs", Decisions { graphs, ..base })
    });
    let scaled = space.fp8_recipes().into_iter().map(|fp8_recipe| {
        let base = base.clone();
        ("fp8_recipe", Decisions { fp8_recipe, ..base })
    });
    let precision = scenario.workload.precision;
    let allowed = |(_, d): &(&str, Decisions)| {
        adapted(d.clone(), scenario) == *d && constraints.allow(d, &scenario.runtime, precision)
    };
    let all = dispatched.chain(overlapped).chain(captured).chain(scaled);
    found.extend(all.filter(allowed));
}

/// Other pipelines of the same layout, each in one decision.
fn of_pipelines(
    all: &[PipelineChoice],
    base: &Decisions,
    found: &mut Vec<(&'static str, Decisions)>,
) {
    let mut schedules: BTreeMap<_, (Apart, &PipelineChoice, ActivationChoice)> = BTreeMap::new();
    for pipeline in all {
        let same = (pipeline.schedule, pipeline.vpp) == (base.schedule, base.vpp);
        for &activations in &pipeline.activations {
            let (stages, schedule) = (&pipeline.stages, pipeline.schedule);
            let distance = pipelines(base, schedule, pipeline.vpp, stages, activations);
            if same {
                let other_stages = *stages != base.stages;
                let other_recompute = activations.recompute != base.recompute;
                let other_offload = activations.offload_layers != base.offload_layers;
                let decision = match (other_stages, other_recompute, other_offload) {
                    (true, false, false) => "stages",
                    (false, true, false) => "recompute",
                    (false, false, true) => "offload_layers",
                    _ => continue,
                };
                found.push((decision, with_pipeline(base, pipeline, activations)));
                continue;
            }
            let new = (distance, pipeline, activations);
            let known = schedules.entry((schedule, pipeline.vpp)).or_insert(new);
            if distance < known.0 {
                *known = new;
            }
        }
    }
    let schedules = schedules.into_values();
    found.extend(schedules.map(|(_, p, of)| ("schedule", with_pipeline(base, p, of))));
}

/// Other ways to hold and shard states in the same layout, each in one decision.
fn of_shardings(
    all: &[ShardingChoice],
    base: &Decisions,
    found: &mut Vec<(&'static str, Decisions)>,
) {
    let level = |d: &Decisions| (u8::from(d.zero), d.reshard_after_forward, d.dp_replicate);
    let mut levels: BTreeMap<(u8, bool, u64), (Apart, Decisions)> = BTreeMap::new();
    for choice in all {
        let d = choice.of(base);
        if level(&d) == level(base) {
            let other_gradients = d.gradients != base.gradients;
            let other_optimizer = d.optimizer_states != base.optimizer_states;
            let other_offload = d.offload != base.offload;
            let other_prefetch = d.prefetch != base.prefetch;
            let others = [
                (other_gradients, "grad_dtype"),
                (other_optimizer, "optim_states"),
                (other_offload, "offload"),
                (other_prefetch, "prefetch"),
            ];
            let mut others = others.into_iter().filter(|(other, _)| *other);
            let (Some((_, decision)), None) = (others.next(), others.next()) else {
                continue;
            };
            found.push((decision, d));
            continue;
        }
        let distance = shardings(base, &d);
        let nearer = |known: &(Apart, Decisions)| distance < known.0;
        if levels.get(&level(&d)).is_none_or(nearer) {
            levels.insert(level(&d), (distance, d));
        }
    }
    found.extend(levels.into_values().map(|(_, d)| ("zero", d)));
}

/// Overlaps one change away: with one kind of message, or every kind, set to the runtime's own value; and with one kind
/// switched that the runtime can switch.
fn overlaps(d: &Decisions, scenario: &Scenario) -> Vec<Overlap> {
    let (own, usual) = (d.overlap, scenario.runtime.overlap);
    let runtime = &scenario.runtime;
    let switches = runtime.overlaps_tensor_parallel_on(&scenario.cluster) && d.sequence_parallel;
    let grad_reduce = usual.grad_reduce;
    let param_gather = usual.param_gather;
    let tensor_parallel = usual.tensor_parallel;
    let pipeline = usual.pipeline;
    let mut all = vec![
        usual,
        Overlap { grad_reduce, ..own },
        Overlap {
            param_gather,
            ..own
        },
        Overlap {
            tensor_parallel,
            ..own
        },
        Overlap { pipeline, ..own },
    ];
    let tensor_parallel = !own.tensor_parallel;
    all.extend(switches.then_some(Overlap {
        tensor_parallel,
        ..own
    }));
    let expert_parallel = !own.expert_parallel;
    let switches = scenario.runtime.space.expert_overlap && d.ep > 1;
    all.extend(switches.then_some(Overlap {
        expert_parallel,
        ..own
    }));
    all.retain(|overlap| *overlap != own);
    all
}

/// Simulates strategies that differ from another in one decision: those that fit first, each group best first.
///
/// # Errors
/// When a block cannot be priced.
pub(crate) fn changes(
    costs: &CostModel,
    options: &SearchOptions<'_>,
    of: &Strategy,
    to: Vec<(&'static str, Strategy)>,
) -> Result<Vec<Change>, PlannerError> {
    let scenario = costs.scenario();
    let limit = limit(costs, options);
    let scored = to.into_par_iter().map(|(decision, strategy)| {
        let score = costs.score(&strategy)?;
        Ok(Change {
            decision,
            words: changed_words(of, &strategy),
            changes_results: !same_results(of, &strategy),
            strategy,
            step_time: score.step_time,
            peak_memory: score.peak_memory,
            p_fits: scenario.p_fits(score.peak_memory),
            fits: score.peak_memory <= limit && score.fits_host,
        })
    });
    let mut changes: Vec<Change> = scored.collect::<Result<_, PlannerError>>()?;
    changes.sort_by(|a, b| {
        let time = a.step_time.0.total_cmp(&b.step_time.0);
        let memory = a.peak_memory.cmp(&b.peak_memory);
        let first = match options.objective {
            Objective::Time => time.then(memory),
            Objective::Memory => memory.then(time),
        };
        let fits = b.fits.cmp(&a.fits);
        fits.then(first).then_with(|| a.strategy.cmp(&b.strategy))
    });
    Ok(changes)
}

/// For every decision the best change of a strategy, with its prediction, fastest first; those that do not fit in
/// memory at the strategy's own risk come last.
///
/// # Errors
/// When a block cannot be priced.
pub fn best_of_each(costs: &CostModel, of: &Strategy) -> Result<Vec<Candidate>, PlannerError> {
    let scenario = costs.scenario();
    let near = strategies(scenario, &Constraints::default(), of);
    let first = costs.predict(of)?;
    let risk = risk_of(&first);
    let options = SearchOptions {
        risk: Some(risk),
        ..SearchOptions::default()
    };
    let mut known: Vec<&str> = Vec::new();
    let mut best = changes(costs, &options, of, near)?;
    best.retain(|change| {
        let new = !known.contains(&change.decision);
        known.push(change.decision);
        new
    });
    let predicted = best.into_par_iter().map(|change| {
        let prediction = costs.predict(&change.strategy)?;
        Ok(Candidate {
            why_not_first: why_not(&first, &prediction, risk),
            strategy: change.strategy,
            prediction,
        })
    });
    predicted.collect()
}

/// The largest risk of not fitting that another plan may have to be proposed instead of the chosen one: as large as the chosen
/// plan's own, but from [`RISK`] to [`EVEN`].
#[must_use]
pub fn risk_of(chosen: &Prediction) -> f64 {
    (1.0 - chosen.p_fits).clamp(RISK, EVEN)
}

/// Why a strategy is not first; of one that fits, but not at this risk, which risk would choose it.
fn why_not(first: &Prediction, other: &Prediction, risk: f64) -> String {
    let why = why_not_first(first, other, "");
    if !other.fit.fits() || other.may_choose(risk) {
        return why;
    }
    let (p_fits, needed) = (other.p_fits, risk_to_take(other.p_fits));
    format!("fits with probability {p_fits:.2} only (--risk {needed:.2} would choose it); {why}")
}
