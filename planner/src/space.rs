//! The finite space of strategies that a search covers, as a tree: layouts (sizes of the mesh, micro-batch, how
//! sequences are divided), then pipelines with their recomputation, then ways to run passes, then ways to hold and shard
//! states and axis orders.
//!
//! What is tried:
//! - tensor parallelism: sizes that divide the heads, within a scale-up domain; with and without
//!   overlap of its messages, where the runtime can do both;
//! - context parallelism: divisors of the world, if they are powers of two or split sequences evenly;
//! - pipeline ranks: divisors of the world, at most one for each layer;
//! - expert parallelism: divisors of the experts, over at most 64 ranks;
//! - micro-batches: up to 64 sequences, powers of two and three times those;
//! - virtual stages: up to 16 per rank, if the layers fill them in a way listed below;
//! - recomputed layers, and layers whose activations lie in host memory: eighths of a stage;
//! - layers of stages: even (a remainder is spread over the middle, without virtual stages), or
//!   up to `uneven` fewer at the ends; on several pools also equal for all ranks of a pool (but
//!   for one pool with a remainder), with a power of two of stages per rank;
//! - hybrid sharding: groups of replicas whose number divides the data-parallel ranks;
//! - gathering parameters ahead by each number of blocks that the runtime offers;
//! - optimizer states in host memory: of quarters of the weights, or all.
//!
//! A size that a constraint fixes, or that a strategy in use has, is tried even if it lies outside these ranges.
//! A decision that does not change a step (context kind without context parallelism, axis order without a pipeline,
//! ZeRO where every rank is alone with its states) has only one value, so that every strategy counts once.

use std::collections::BTreeMap;
use std::sync::Arc;

use catalog::prefetch::Ahead;
use catalog::runtime::RecomputeMode;
use catalog::{Axis, AxisOrder, Runtime, Zero};
use costmodel::{Lightest, Scenario};
use plans::legality::check_layout;
use plans::support::{allowed_by, equal_expert_dp};
use plans::{Decisions, Recompute, StagePartition, Strategy, StrategyError};
use rayon::prelude::*;

use crate::chains::Shardings;
use crate::choices::{ActivationChoice, Asked, PipelineChoice, ShardingChoice};
use crate::constraints::Constraints;
use crate::executions::{Allows, ExecutionChoice};
use crate::holders::Holders;
use crate::layouts::{Layout, layouts, meshes};

/// Rule against pipelines in which too many micro-batches pass through too many stages.
const TOO_LONG: &str = "more passes of micro-batches through stages than are simulated";

/// The space of strategies. Layouts are listed. Their choices are shared between layouts, and
/// strategies are made one by one.
#[derive(Clone, Debug)]
pub struct SearchSpace {
    scenario: Scenario,
    constraints: Constraints,
    present: Option<Decisions>,
    /// Whether every number of layers is tried, rather than eighths of them.
    every_number: bool,
    layouts: Vec<Layout>,
    /// Number of strategies of every layout.
    members: Vec<u64>,
    /// The pipelines, for each number of pipeline ranks and of micro-batches.
    pipelines: BTreeMap<(u64, u64), Arc<Vec<PipelineChoice>>>,
    /// The ways to shard states, for each value of [`Layout::sharded_over`] that occurs.
    shardings: BTreeMap<Holders, Shardings>,
    /// Combinations of sizes left out, counted by the rule that excludes them.
    pub illegal: BTreeMap<String, u64>,
}

impl SearchSpace {
    /// Enumerates the legal layouts of a scenario under constraints, and counts their strategies.
    #[must_use]
    pub fn new(scenario: &Scenario, constraints: &Constraints) -> Self {
        Self::of(scenario, constraints, None, &|_| true)
    }

    /// Like [`Self::new`], with the values of a strategy in use, even outside the usual ranges.
    #[must_use]
    pub fn with_present(
        scenario: &Scenario,
        constraints: &Constraints,
        present: &Decisions,
    ) -> Self {
        Self::of(scenario, constraints, Some(present), &|_| true)
    }

    /// The strategies whose mesh differs from that of `present` in at most two axes.
    #[must_use]
    pub(crate) fn near(
        scenario: &Scenario,
        constraints: &Constraints,
        present: &Decisions,
    ) -> Self {
        let near = |mesh: &Layout| mesh.axes_unlike(present) <= 2;
        Self::of(scenario, constraints, Some(present), &near)
    }

    fn of(
        scenario: &Scenario,
        constraints: &Constraints,
        present: Option<&Decisions>,
        wanted: &dyn Fn(&Layout) -> bool,
    ) -> Self {
        let mut space = Self {
            scenario: scenario.clone(),
            constraints: constraints.clone(),
            present: present.cloned(),
            every_number: false,
            layouts: Vec::new(),
            members: Vec::new(),
            pipelines: BTreeMap::new(),
            shardings: BTreeMap::new(),
            illegal: BTreeMap::new(),
        };
        let asked = space.asked();
        let mut illegal = BTreeMap::new();
        let mut found = Vec::new();
        meshes(asked, &mut illegal, &mut |mesh| found.push(mesh));
        found.retain(wanted);
        let all: Vec<Layout> = found
            .iter()
            .flat_map(|&mesh| layouts(asked, mesh, &mut illegal))
            .collect();
        let pipelines = pipelines(asked, &all, &mut illegal);
        let shardings = shardings(asked, &all);
        let checked: Vec<Checked> = all
            .par_iter()
            .map(|layout| {
                let pipelines = &pipelines[&(layout.pp, layout.num_micro_batches)];
                let shardings = &shardings[&layout.sharded_over(&scenario.model)].all;
                check(asked, layout, pipelines, shardings)
            })
            .collect();
        for (layout, checked) in all.into_iter().zip(checked) {
            match checked {
                Checked::Legal(count) => {
                    space.layouts.push(layout);
                    space.members.push(count);
                }
                Checked::Illegal(rule, families) => {
                    *illegal.entry(rule.to_owned()).or_default() += families;
                }
                Checked::Empty => {}
            }
        }
        space.pipelines = pipelines;
        space.shardings = shardings;
        space.illegal = illegal;
        space
    }

    /// The space restricted to these plans' layouts. If a plan recomputes anything or keeps activations in host memory, its layout
    /// is tried with every number of layers. `None` if the runtime takes no numbers of layers, or no plan does either.
    #[must_use]
    pub fn finer(&self, plans: &[&Decisions]) -> Option<Self> {
        let offered = &self.scenario.runtime.space;
        let numbered =
            |mode: &RecomputeMode| matches!(mode, RecomputeMode::Layers | RecomputeMode::Falling);
        let numbered = offered.offload_layers || offered.recompute.iter().any(numbered);
        let spares = |d: &&Decisions| d.recompute != Recompute::None || d.offload_layers > 0;
        let of_plans = |plans: &mut dyn Iterator<Item = &&Decisions>| -> Vec<Layout> {
            let sizes: Vec<[u64; 7]> = plans.map(|d| crate::simplicity::layout(d)).collect();
            let layouts = self.layouts.iter().copied();
            layouts.filter(|l| sizes.contains(&l.sizes())).collect()
        };
        let spare = of_plans(&mut plans.iter().filter(|d| spares(d)));
        if !numbered || spare.is_empty() {
            return None;
        }
        let layouts = of_plans(&mut plans.iter());
        let key = |l: &Layout| (l.pp, l.num_micro_batches);
        let known = |l: &Layout| (key(l), Arc::clone(&self.pipelines[&key(l)]));
        let mut finer = Self {
            every_number: true,
            pipelines: layouts.iter().map(known).collect(),
            layouts,
            illegal: BTreeMap::new(),
            ..self.clone()
        };
        let every_number = pipelines(finer.asked(), &spare, &mut BTreeMap::new());
        finer.pipelines.extend(every_number);
        let asked = finer.asked();
        let counted = |l: &Layout| members(asked, l, finer.pipelines(l), finer.shardings(l));
        finer.members = finer.layouts.iter().map(counted).collect();
        Some(finer)
    }

    /// Whether any strategy is legal; enumeration stops at the first.
    #[must_use]
    pub fn has_any(scenario: &Scenario, constraints: &Constraints) -> bool {
        let asked = Asked::new(scenario, constraints);
        let mut illegal = BTreeMap::new();
        let mut found = Vec::new();
        meshes(asked, &mut illegal, &mut |mesh| found.push(mesh));
        found.into_iter().any(|mesh| {
            let layouts = layouts(asked, mesh, &mut illegal);
            layouts.iter().any(|layout| {
                let pipelines = asked.pipelines(layout.pp, layout.num_micro_batches);
                let shardings = asked.shardings(layout.sharded_over(&scenario.model));
                let checked = check(asked, layout, &pipelines, &shardings);
                matches!(checked, Checked::Legal(_))
            })
        })
    }

    /// Number of strategies.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.members.iter().sum()
    }

    /// Whether the space has no strategy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layouts.is_empty()
    }

    /// All layouts that have strategies, in order of enumeration.
    #[must_use]
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts
    }

    /// The pipelines of a layout.
    #[must_use]
    pub fn pipelines(&self, layout: &Layout) -> &Arc<Vec<PipelineChoice>> {
        &self.pipelines[&(layout.pp, layout.num_micro_batches)]
    }

    /// All pairs of a pipeline of a layout and a choice for its activations.
    pub(crate) fn each_pipeline(
        &self,
        layout: &Layout,
    ) -> impl Iterator<Item = (&PipelineChoice, ActivationChoice)> + use<'_> {
        let all = self.pipelines(layout).iter();
        all.flat_map(|pipeline| pipeline.activations.iter().map(move |&of| (pipeline, of)))
    }

    /// All numbers of pipeline ranks and micro-batches, with their pipelines.
    pub(crate) fn all_pipelines(&self) -> &BTreeMap<(u64, u64), Arc<Vec<PipelineChoice>>> {
        &self.pipelines
    }

    /// The ways to hold and shard states of a layout.
    #[must_use]
    pub fn shardings(&self, layout: &Layout) -> &[ShardingChoice] {
        &self.ways(layout).all
    }

    /// A layout's ways to hold and shard states, in chains: later ways are tried only if needed.
    pub(crate) fn ways(&self, layout: &Layout) -> &Shardings {
        &self.shardings[&layout.sharded_over(&self.scenario.model)]
    }

    /// For every ZeRO level and choice of states in host memory, the way to shard a layout's states
    /// that leaves least on a rank, with the gradients of `base` and the smallest optimizer states.
    pub(crate) fn lightest(&self, layout: &Layout, base: &Decisions) -> Lightest {
        lightest(self.asked(), self.shardings(layout), base)
    }

    /// The runtime whose space this is.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.scenario.runtime
    }

    /// The axis orders of a layout.
    #[must_use]
    pub fn orders(&self, layout: &Layout) -> &[AxisOrder] {
        orders(self.asked(), layout)
    }

    /// The decisions of a layout, with the smallest types of gradients, the usual values of all else that it leaves open,
    /// and no stages.
    #[must_use]
    pub fn decisions(&self, layout: &Layout) -> Decisions {
        decisions(self.asked(), layout)
    }

    /// The decisions of a layout, once for every way to run passes that `allows` permits.
    pub(crate) fn executed(&self, layout: &Layout, allows: Allows) -> Vec<Decisions> {
        let base = self.decisions(layout);
        let executions = self.asked().executions_with(layout, allows).into_iter();
        executions.map(|execution| execution.of(&base)).collect()
    }

    /// The ways to run passes that a pipeline allows with a choice for its activations.
    pub(crate) fn allows(
        &self,
        layout: &Layout,
        pipeline: &PipelineChoice,
        activations: ActivationChoice,
    ) -> Allows {
        Allows::of(&self.scenario, layout, pipeline, activations)
    }

    /// The ways to run the passes of a layout with a pipeline and a choice for its activations.
    pub(crate) fn executions(
        &self,
        layout: &Layout,
        pipeline: &PipelineChoice,
        activations: ActivationChoice,
    ) -> Vec<ExecutionChoice> {
        let allows = self.allows(layout, pipeline, activations);
        self.asked().executions_with(layout, allows)
    }

    /// Number of strategies with a pipeline, a choice for its activations and any of `executions`.
    pub(crate) fn beside(&self, layout: &Layout, executions: &[ExecutionChoice]) -> u64 {
        let shardings = self.shardings(layout);
        beside(shardings, executions, self.runtime()) * self.orders(layout).len() as u64
    }

    /// Number of strategies of a layout, which is given by its index.
    pub(crate) fn members(&self, layout: u32) -> u64 {
        self.members[layout as usize]
    }

    /// All strategies of a layout.
    #[must_use]
    pub fn strategies(&self, layout: &Layout) -> Vec<Strategy> {
        let mut all = Vec::new();
        for (pipeline, activations) in self.each_pipeline(layout) {
            let d = with_pipeline(&self.decisions(layout), pipeline, activations);
            for execution in self.executions(layout, pipeline, activations) {
                all.extend(self.beneath(layout, &d, execution));
            }
        }
        all
    }

    /// All strategies with the pipeline and activations of `d` whose passes run as `execution`.
    fn beneath(&self, layout: &Layout, d: &Decisions, execution: ExecutionChoice) -> Vec<Strategy> {
        let shardings = self.shardings(layout);
        let mut all = Vec::with_capacity(shardings.len() * self.orders(layout).len());
        let d = execution.of(d);
        let runtime = self.runtime();
        let beside = shardings
            .iter()
            .filter(|way| execution.leaves(way, runtime));
        for sharding in beside {
            for &axis_order in self.orders(layout) {
                all.push(self.with_sharding(&d, sharding, axis_order));
            }
        }
        all
    }

    /// The strategy that adds a sharding and an axis order to the layout, pipeline and recomputation of `d`.
    pub(crate) fn with_sharding(
        &self,
        d: &Decisions,
        sharding: &ShardingChoice,
        axis_order: AxisOrder,
    ) -> Strategy {
        let d = Decisions {
            axis_order,
            ..sharding.of(d)
        };
        let strategy = Strategy::new(d, &self.scenario.model, &self.scenario.workload);
        strategy.expect("layout and pipeline were found legal")
    }

    /// The question whose space this is.
    pub(crate) fn asked(&self) -> Asked<'_> {
        Asked {
            scenario: &self.scenario,
            constraints: &self.constraints,
            present: self.present.as_ref(),
            every_number: self.every_number,
        }
    }
}

/// The decisions with a pipeline and a choice for its activations.
pub(crate) fn with_pipeline(
    d: &Decisions,
    pipeline: &PipelineChoice,
    activations: ActivationChoice,
) -> Decisions {
    Decisions {
        schedule: pipeline.schedule,
        vpp: pipeline.vpp,
        stages: pipeline.stages.clone(),
        recompute: activations.recompute,
        offload_layers: activations.offload_layers,
        ..d.clone()
    }
}

/// For every ZeRO level and choice of states in host memory, the one of `shardings` that leaves
/// least on a rank, with the gradients of `base` and the smallest optimizer states.
pub(crate) fn lightest(
    asked: Asked<'_>,
    shardings: &[ShardingChoice],
    base: &Decisions,
) -> Lightest {
    let mut least: BTreeMap<_, ShardingChoice> = BTreeMap::new();
    for &choice in shardings {
        let known = least
            .entry((choice.zero, choice.reshard_after_forward, choice.offload))
            .or_insert(choice);
        // A smaller depth of prefetching takes less memory.
        let holds = |choice: ShardingChoice| {
            let ahead = asked.scenario.runtime.ahead(choice.prefetch);
            (choice.dp_replicate, ahead.map(Ahead::blocks))
        };
        if holds(choice) < holds(*known) {
            *known = choice;
        }
    }
    let smallest = asked.optimizer_states().pop().flatten();
    let of_level = |choice: ShardingChoice| Decisions {
        gradients: base.gradients,
        optimizer_states: smallest
            .filter(|states| choice.zero != Zero::Z0 || !states.completes_parameters())
            .filter(|_| choice.offload.is_none()),
        ..choice.of(base)
    };
    let all = least.into_values().map(of_level);
    let (on_device, on_host) = all.partition(|d| d.offload.is_none());
    Lightest { on_device, on_host }
}

/// The decisions of a layout, with the smallest types of gradients, the usual values of all else that it leaves open, and no
/// stages.
pub(crate) fn decisions(asked: Asked<'_>, layout: &Layout) -> Decisions {
    Decisions {
        tp: layout.tp,
        pp: layout.pp,
        cp: layout.cp,
        cp_kind: layout.cp_kind,
        ep: layout.ep,
        etp: layout.etp,
        dp_replicate: layout.dp,
        sequence_parallel: layout.sequence_parallel,
        micro_batch: layout.micro_batch,
        num_micro_batches: layout.num_micro_batches,
        axis_order: (orders(asked, layout).first().copied()).unwrap_or(AxisOrder::TP_CP_DP_PP),
        stages: StagePartition(Vec::new()),
        gradients: asked.least_gradients(),
        ..Decisions::on_one_gpu(0, asked.scenario.runtime.overlap)
    }
}

/// The pipelines of layouts, by their ranks and micro-batches; those that are too long to be simulated are counted.
fn pipelines(
    asked: Asked<'_>,
    layouts: &[Layout],
    illegal: &mut BTreeMap<String, u64>,
) -> BTreeMap<(u64, u64), Arc<Vec<PipelineChoice>>> {
    let sizes = layouts.iter().map(|l| (l.pp, l.num_micro_batches));
    let mut sizes: Vec<(u64, u64)> = sizes.collect();
    sizes.sort_unstable();
    sizes.dedup();
    let of_sizes = |&(pp, micro_batches): &(u64, u64)| {
        let pipelines = Arc::new(asked.pipelines(pp, micro_batches));
        ((pp, micro_batches), pipelines)
    };
    let too_long = |&(pp, micro_batches): &(u64, u64)| asked.too_long(pp, micro_batches);
    let too_long: u64 = sizes.iter().map(too_long).sum();
    if too_long > 0 {
        illegal.insert(TOO_LONG.to_owned(), too_long);
    }
    sizes.par_iter().map(of_sizes).collect()
}

/// The ways to shard the states of these layouts.
fn shardings(asked: Asked<'_>, layouts: &[Layout]) -> BTreeMap<Holders, Shardings> {
    let mut all = BTreeMap::new();
    let model = &asked.scenario.model;
    for over in layouts.iter().map(|layout| layout.sharded_over(model)) {
        all.entry(over)
            .or_insert_with(|| Shardings::new(asked.shardings(over), &asked.scenario.runtime));
    }
    all
}

/// The axis orders of a layout. Without a pipeline, or without ranks that hold the same parameters, all orders are the same. On several
/// pools the pipeline is the outermost axis.
fn orders<'a>(asked: Asked<'a>, layout: &Layout) -> &'a [AxisOrder] {
    let Scenario {
        runtime,
        cluster,
        model,
        ..
    } = asked.scenario;
    let space = &runtime.space;
    let all = &space.axis_orders[..];
    let spread = model.moe.map(|_| layout.ep * layout.etp);
    let may_be_inner =
        !space.inner_pipeline_needs_equal_dp || equal_expert_dp(spread, layout.tp, layout.cp);
    if cluster.pools.is_some() || !may_be_inner {
        let outermost = |order: &AxisOrder| order.0.last() == Some(&Axis::Pp);
        let first = all.iter().position(outermost);
        return first.map_or(&[], |at| &all[at..=at]);
    }
    let one = layout.pp == 1 || layout.dp * layout.cp == 1;
    if one { &all[..all.len().min(1)] } else { all }
}

/// The result of checking a layout.
enum Checked {
    /// Legal, with this number of strategies.
    Legal(u64),
    /// It breaks this rule. The number counts the strategies left out with it.
    Illegal(&'static str, u64),
    /// No strategy has it: no pipeline, way to shard states or axis order goes with it.
    Empty,
}

/// Whether a layout and its pipelines are legal, and how many strategies they have. No rule concerns both a pipeline
/// and the way that states are sharded.
fn check(
    asked: Asked<'_>,
    layout: &Layout,
    pipelines: &[PipelineChoice],
    shardings: &[ShardingChoice],
) -> Checked {
    let Asked { scenario, .. } = asked;
    let orders = orders(asked, layout);
    let beside = (shardings.len() * orders.len()) as u64;
    let families = pipelines.len() as u64 * beside;
    let (Some(sharding), Some(pipeline)) = (shardings.first(), pipelines.first()) else {
        return Checked::Empty;
    };
    if families == 0 {
        return Checked::Empty;
    }
    let base = sharding.of(&decisions(asked, layout));
    let (model, workload) = (&scenario.model, &scenario.workload);
    if let Err(error) = check_layout(&base, model, workload) {
        return Checked::Illegal(rule(&error), families);
    }
    // A runtime may forbid a layout. Pipelines are already those that it has.
    let any = with_pipeline(&base, pipeline, pipeline.activations[0]);
    if allowed_by(&any, model, &scenario.runtime, workload.precision).is_err() {
        return Checked::Illegal("the runtime cannot express it", families);
    }
    match members(asked, layout, pipelines, shardings) {
        0 => Checked::Empty,
        members => Checked::Legal(members),
    }
}

/// Number of strategies of a layout with these pipelines and ways to shard states.
fn members(
    asked: Asked<'_>,
    layout: &Layout,
    pipelines: &[PipelineChoice],
    shardings: &[ShardingChoice],
) -> u64 {
    let mut counts: BTreeMap<Allows, u64> = BTreeMap::new();
    for pipeline in pipelines {
        for &activations in &pipeline.activations {
            let allows = Allows::of(asked.scenario, layout, pipeline, activations);
            *counts.entry(allows).or_default() += 1;
        }
    }
    let of_each = |allows| {
        let executions = asked.executions_with(layout, allows);
        beside(shardings, &executions, &asked.scenario.runtime)
    };
    let counts = counts.into_iter();
    let orders = orders(asked, layout).len() as u64;
    let sum: u64 = counts.map(|(allows, count)| count * of_each(allows)).sum();
    sum * orders
}

/// Number of pairs of a way to run passes and a way to shard states that go together.
fn beside(shardings: &[ShardingChoice], executions: &[ExecutionChoice], runtime: &Runtime) -> u64 {
    let pairs = executions.iter().map(|of| {
        let ways = shardings.iter();
        ways.filter(|way| of.leaves(way, runtime)).count()
    });
    pairs.sum::<usize>() as u64
}

/// Short name of the rule that a layout breaks, as a key for counting.
fn rule(error: &StrategyError) -> &'static str {
    use StrategyError as E;
    match error {
        E::Divides { what, .. } => what,
        E::Schedule(_) => "the schedule does not exist for these sizes",
        E::Stages { .. } => "layers do not fill the stages",
        E::Batch { .. } => "the global batch does not come out",
        E::Passes { .. } => TOO_LONG,
        E::Elements { .. } => "a tensor has more elements than are counted",
        E::Conflict(why) => why,
        E::Zero { .. } | E::World { .. } | E::Runtime { .. } | E::Syntax(_) => "sizes do not match",
    }
}
