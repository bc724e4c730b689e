//! Strategies one decision away from a strategy, chosen from the search space.
//!
//! A decision is the size of an axis, with ranks moved to or from one other axis; or one of these:
//! expert sizes, micro-batch, sequence parallelism, context kind, schedule with virtual stages,
//! stages, recomputation, activation offload, state sharding, gradient types, optimizer states,
//! prefetching, axis order, overlap, dispatcher, CUDA graphs, 8-bit scales. What must follow from
//! it (such as virtual stages when the pipeline changes) differs as little as the space allows.

use std::collections::{BTreeMap, BTreeSet};

use catalog::{Overlap, ScheduleKind, elementary};
use costmodel::{CostModel, Scenario};
use plans::grammar::changed_words;
use plans::present::{Change, same_results};
use plans::{Candidate, Decisions, EVEN, Prediction, Recompute, StagePartition, Strategy, Zero};
use rayon::prelude::*;

use crate::PlannerError;
use crate::constraints::Constraints;
use crate::executions::adapted;
use crate::explain::why_not_first;
use crate::layouts::Layout;
use crate::options::{RISK, SearchOptions, limit, risk_to_take};
use crate::space::{SearchSpace, with_pipeline};

/// How far two strategies are apart: the number of decisions that differ, then by how much they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Apart {
    pub(crate) decisions: usize,
    amount: u64,
}

/// Distance between two unlike values of a choice: more than between any two sizes.
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
    order.choice(a.usual_order(), b.usual_order());
    order.choice(a.overlap, b.overlap);
    order.choice(a.dispatcher, b.dispatcher);
    order.choice(a.graphs, b.graphs);
    order.choice(a.fp8_recipe, b.fp8_recipe);
    let others = pipelines(a, b).and(shardings(a, b));
    layouts(a, b).and(others).and(order)
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

fn pipelines(a: &Decisions, b: &Decisions) -> Apart {
    let mut order = Apart::default();
    order.size(a.vpp, b.vpp);
    order.choice(kind(a.schedule), kind(b.schedule));
    // Schedule and virtual stages are one decision.
    order.decisions = order.decisions.min(1);
    if a.stages.0.len() == b.stages.0.len() {
        order.choice(&a.stages, &b.stages);
    } else if b.stages != StagePartition::even(b.stages.layers(), b.stages.0.len() as u64) {
        order.amount += 1;
    }
    match (a.recompute, b.recompute) {
        (Recompute::Layers(a), Recompute::Layers(b))
        | (Recompute::Falling(a), Recompute::Falling(b)) => order.size(a, b),
        (a, b) => order.choice(a, b),
    }
    match (a.offload_layers, b.offload_layers) {
        (0, b) => order.choice(0, b),
        (a, 0) => order.choice(a, 0),
        (a, b) => order.size(a, b),
    }
    order
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
    let gathered = |d: &Decisions| d.prefetch.filter(|_| d.gathers_in_every_pass());
    apart.choice(gathered(a), gathered(b));
    apart
}

/// The strategy of a layout that differs least from `to`; `None` if the layout has none.
fn nearest(space: &SearchSpace, layout: &Layout, to: &Decisions) -> Option<Decisions> {
    let base = Decisions {
        overlap: to.overlap,
        dispatcher: to.dispatcher,
        graphs: to.graphs,
        fp8_recipe: to.fp8_recipe,
        ..space.decisions(layout)
    };
    let all = space.each_pipeline(layout);
    let all = all.map(|(pipeline, activations)| with_pipeline(&base, pipeline, activations));
    let d = all.min_by_key(|d| pipelines(to, d))?;
    let all = space.shardings(layout).iter().map(|way| way.of(&d));
    let d = all.min_by_key(|d| shardings(to, d))?;
    let orders = space.orders(layout);
    let order = orders.iter().find(|&&order| order == to.axis_order);
    let axis_order = *order.or(orders.first())?;
    Some(Decisions { axis_order, ..d })
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
        of_pipelines(&space, layout, &base, &mut found);
        of_shardings(&space, layout, &base, &mut found);
        for &axis_order in space.orders(layout) {
            let base = base.clone();
            found.push(("order", Decisions { axis_order, ..base }));
        }
        of_executions(&space, layout, &base, (scenario, constraints), &mut found);
    }
    for (_, d) in &mut found {
        *d = adapted(d.clone(), scenario);
    }
    let same_job = of.canonical(&scenario.model);
    let mut all: Vec<(&'static str, Strategy)> = Vec::new();
    for (decision, d) in found {
        let strategy = Strategy::new(d, &scenario.model, &scenario.workload);
        let new = |s: &Strategy| {
            let same = s.canonical(&scenario.model) == same_job;
            !same && !all.iter().any(|(_, known)| known == s)
        };
        let strategy = strategy.ok().filter(new);
        all.extend(strategy.map(|s| (decision, s)));
    }
    all
}

/// Adds to `found` the other ways to run the passes of `base` that constraints allow.
fn of_executions(
    space: &SearchSpace,
    layout: &Layout,
    base: &Decisions,
    (scenario, constraints): (&Scenario, &Constraints),
    found: &mut Vec<(&'static str, Decisions)>,
) {
    let asked = space.asked();
    let mut all = Vec::new();
    for dispatcher in asked.dispatchers(layout) {
        let base = base.clone();
        all.push(("dispatcher", Decisions { dispatcher, ..base }));
    }
    for overlap in overlaps(base, scenario) {
        let base = base.clone();
        all.push(("overlap", Decisions { overlap, ..base }));
    }
    for graphs in asked.graphs(layout) {
        let base = base.clone();
        all.push(("graphs", Decisions { graphs, ..base }));
    }
    for fp8_recipe in asked.fp8_recipes() {
        let base = base.clone();
        all.push(("fp8_recipe", Decisions { fp8_recipe, ..base }));
    }
    let precision = scenario.workload.precision;
    let allowed = |(_, d): &(&str, Decisions)| {
        adapted(d.clone(), scenario) == *d && constraints.allow(d, &scenario.runtime, precision)
    };
    found.extend(all.into_iter().filter(allowed));
}

/// Adds to `found` the other pipelines of the layout of `base`, each one decision away.
fn of_pipelines(
    space: &SearchSpace,
    layout: &Layout,
    base: &Decisions,
    found: &mut Vec<(&'static str, Decisions)>,
) {
    let all = space.each_pipeline(layout);
    let all = all.map(|(pipeline, activations)| with_pipeline(base, pipeline, activations));
    let others = |d: &Decisions| {
        vec![
            ("stages", d.stages != base.stages),
            ("recompute", d.recompute != base.recompute),
            ("offload_layers", d.offload_layers != base.offload_layers),
        ]
    };
    let group = |d: &Decisions| (d.schedule, d.vpp);
    let nearest = one_decision_away(all, base, (group, others), pipelines, found);
    found.extend(nearest.into_iter().map(|d| ("schedule", d)));
}

/// Adds to `found` the other ways to hold and shard states, each one decision away from `base`.
fn of_shardings(
    space: &SearchSpace,
    layout: &Layout,
    base: &Decisions,
    found: &mut Vec<(&'static str, Decisions)>,
) {
    let all = space.shardings(layout).iter().map(|way| way.of(base));
    let others = |d: &Decisions| {
        vec![
            ("grad_dtype", d.gradients != base.gradients),
            ("optim_states", d.optimizer_states != base.optimizer_states),
            ("offload", d.offload != base.offload),
            ("prefetch", d.prefetch != base.prefetch),
        ]
    };
    let group = |d: &Decisions| (u8::from(d.zero), d.reshard_after_forward, d.dp_replicate);
    let nearest = one_decision_away(all, base, (group, others), shardings, found);
    found.extend(nearest.into_iter().map(|d| ("zero", d)));
}

/// Adds those strategies of the group of `base` that differ from it in exactly one of `others`, and returns the nearest of
/// each other group.
fn one_decision_away<K: Ord>(
    all: impl Iterator<Item = Decisions>,
    base: &Decisions,
    (group, others): (
        impl Fn(&Decisions) -> K,
        impl Fn(&Decisions) -> Vec<(&'static str, bool)>,
    ),
    apart: fn(&Decisions, &Decisions) -> Apart,
    found: &mut Vec<(&'static str, Decisions)>,
) -> Vec<Decisions> {
    let mut groups: BTreeMap<K, (Apart, Decisions)> = BTreeMap::new();
    for d in all {
        if group(&d) == group(base) {
            let mut others = others(&d).into_iter().filter(|(_, differs)| *differs);
            if let (Some((decision, _)), None) = (others.next(), others.next()) {
                found.push((decision, d));
            }
            continue;
        }
        let distance = apart(base, &d);
        let nearer = |known: &(Apart, Decisions)| distance < known.0;
        if groups.get(&group(&d)).is_none_or(nearer) {
            groups.insert(group(&d), (distance, d));
        }
    }
    groups.into_values().map(|(_, d)| d).collect()
}

/// Overlaps one change away: with one kind of message, or every kind, set to the runtime's own value; and with one kind
/// switched that the runtime can switch.
fn overlaps(d: &Decisions, scenario: &Scenario) -> Vec<Overlap> {
    let runtime = &scenario.runtime;
    let (own, usual) = (d.overlap, runtime.overlap);
    let changed = |change: fn(&mut Overlap, Overlap)| {
        let mut overlap = own;
        change(&mut overlap, usual);
        overlap
    };
    let mut all = vec![
        usual,
        changed(|of, usual| of.grad_reduce = usual.grad_reduce),
        changed(|of, usual| of.param_gather = usual.param_gather),
        changed(|of, usual| of.tensor_parallel = usual.tensor_parallel),
        changed(|of, usual| of.pipeline = usual.pipeline),
    ];
    if runtime.overlaps_tensor_parallel_on(&scenario.cluster) && d.sequence_parallel {
        all.push(changed(|of, _| of.tensor_parallel ^= true));
    }
    if runtime.space.expert_overlap && d.ep > 1 {
        all.push(changed(|of, _| of.expert_parallel ^= true));
    }
    all.retain(|overlap| *overlap != own);
    all
}

/// Simulates strategies that differ from `of` in one decision; sorts fitting ones first, then best.
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
        let [of_a, of_b] = [a, b].map(|change| (change.step_time, change.peak_memory));
        let first = options.objective.order(of_a, of_b);
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
    let mut known = BTreeSet::new();
    let mut best = changes(costs, &options, of, near)?;
    best.retain(|change| known.insert(change.decision));
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

/// The largest risk of not fitting at which another plan is proposed instead of the chosen one: the
/// chosen plan's own risk, but at least [`RISK`] and at most [`EVEN`].
#[must_use]
pub fn risk_of(chosen: &Prediction) -> f64 {
    (1.0 - chosen.p_fits).clamp(RISK, EVEN)
}

/// Why a strategy is not first. If it fits, but not at `risk`, also the risk that would choose it.
fn why_not(first: &Prediction, other: &Prediction, risk: f64) -> String {
    let why = why_not_first(first, other, "");
    if !other.fit.fits() || other.may_choose(risk) {
        return why;
    }
    let (p_fits, needed) = (other.p_fits, risk_to_take(other.p_fits));
    format!("fits with probability {p_fits:.2} only (--risk {needed:.2} would choose it); {why}")
}
