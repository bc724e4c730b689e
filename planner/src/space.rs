//! The finite space of strategies that a search covers, as a tree: layouts (sizes of the mesh, micro-batch, how
//! sequences are divided), then pipelines with their recomputation, then ways to hold and shard states and axis orders.
//!
//! Stated: tensor parallelism over divisors of the heads within a scale-up domain; context
//! parallelism over powers of two; pipeline ranks over divisors of the world, as many as layers;
//! expert sizes over divisors of the experts; micro-batches over powers of two up to 16 sequences;
//! virtual stages over divisors of the layers per rank; recompute counts over eighths of a stage;
//! stages even (a remainder spread over the middle without virtual stages), or lighter at the ends by
//! up to `uneven` layers; experts spread over at most 64 ranks; hybrid sharding over powers of two.
//! A size that a constraint fixes, or that a strategy in use has, is tried even if it lies outside these ranges.
//! A decision that does not change a step (context kind without context parallelism, axis order without a pipeline,
//! ZeRO without data parallelism) has only one value, so that every strategy counts once.

use std::collections::BTreeMap;
use std::sync::Arc;

use catalog::runtime::{RecomputeMode, SequenceParallelUse};
use catalog::{AxisOrder, CpKind, OptimizerStates, ScheduleKind, Zero};
use costmodel::Scenario;
use plans::legality::check_layout;
use plans::support::allowed_by;
use plans::{Decisions, Recompute, StagePartition, Strategy, StrategyError};
use rayon::prelude::*;

use crate::choices::{Asked, PipelineChoice, ShardingChoice, divisors, powers_of_two};
use crate::constraints::{Constraints, switch_name};

/// Largest number of sequences in a micro-batch.
const MAX_MICRO_BATCH: u64 = 16;
/// Largest number of ranks over which one copy of the experts is spread, unless a constraint asks for more.
const MAX_EXPERT_RANKS: u64 = 64;

/// The rule that pipelines break in which too many micro-batches pass through too many stages.
const TOO_LONG: &str = "more passes of micro-batches through stages than are simulated";

/// The space of strategies. Layouts are listed; what they combine with is shared between them, and strategies are made
/// one by one.
#[derive(Clone, Debug)]
pub struct SearchSpace {
    scenario: Scenario,
    constraints: Constraints,
    present: Option<Decisions>,
    layouts: Vec<Layout>,
    /// By pipeline ranks and micro-batches.
    pipelines: BTreeMap<(u64, u64), Arc<Vec<PipelineChoice>>>,
    /// Number of strategies.
    strategies: u64,
    /// Combinations of sizes left out, counted by the rule that excludes them.
    pub illegal: BTreeMap<String, u64>,
}

/// What decides the local shapes of a rank's blocks, and how many micro-batches pass through how many pipeline ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Tensor-parallel size.
    pub tp: u64,
    /// Pipeline-parallel size.
    pub pp: u64,
    /// Context-parallel size.
    pub cp: u64,
    /// Number of all data-parallel ranks.
    pub dp: u64,
    /// Expert-parallel size.
    pub ep: u64,
    /// Tensor-parallel size inside experts.
    pub etp: u64,
    /// Sequences per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per step and data-parallel rank.
    pub num_micro_batches: u64,
    /// How attention communicates under context parallelism.
    pub cp_kind: CpKind,
    /// Whether activations between tensor-parallel blocks are sharded on sequence.
    pub sequence_parallel: bool,
}

impl Layout {
    /// Number of axes of the mesh whose size is not that of some decisions; expert axes divide the same ranks and do not
    /// count.
    pub(crate) fn axes_unlike(&self, d: &Decisions) -> usize {
        let sizes = [
            (self.tp, d.tp),
            (self.pp, d.pp),
            (self.cp, d.cp),
            (self.dp, d.dp()),
        ];
        sizes.iter().filter(|(own, other)| own != other).count()
    }

    /// Whether all sizes, and sequence parallelism, are those of some decisions.
    pub(crate) fn has_sizes_of(&self, d: &Decisions) -> bool {
        let own = [
            self.tp,
            self.pp,
            self.cp,
            self.dp,
            self.ep,
            self.etp,
            self.micro_batch,
        ];
        own == [d.tp, d.pp, d.cp, d.dp(), d.ep, d.etp, d.micro_batch]
            && self.sequence_parallel == d.sequence_parallel
    }
}

impl SearchSpace {
    /// Enumerates the legal layouts of a scenario under constraints, and counts their strategies.
    #[must_use]
    pub fn new(scenario: &Scenario, constraints: &Constraints) -> Self {
        Self::of(scenario, constraints, None, &|_| true)
    }

    /// The same with what a strategy in use has, even if it lies outside the usual ranges.
    #[must_use]
    pub fn with_present(
        scenario: &Scenario,
        constraints: &Constraints,
        present: &Decisions,
    ) -> Self {
        Self::of(scenario, constraints, Some(present), &|_| true)
    }

    /// The strategies whose mesh is that of a strategy in use, or has ranks moved from one axis to another.
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
            layouts: Vec::new(),
            pipelines: BTreeMap::new(),
            strategies: 0,
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
        let mut sizes: Vec<(u64, u64)> = all.iter().map(|l| (l.pp, l.num_micro_batches)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let pipelines = pipelines(asked, &sizes, &mut illegal);
        let checked: Vec<Checked> = all
            .par_iter()
            .map(|layout| {
                let pipelines = &pipelines[&(layout.pp, layout.num_micro_batches)];
                check(asked, layout, pipelines)
            })
            .collect();
        for (layout, checked) in all.into_iter().zip(checked) {
            match checked {
                Checked::Legal(count) => {
                    space.strategies += count;
                    space.layouts.push(layout);
                }
                Checked::Illegal(rule, families) => {
                    *illegal.entry(rule.to_owned()).or_default() += families;
                }
                Checked::Empty => {}
            }
        }
        space.pipelines = pipelines;
        space.illegal = illegal;
        space
    }

    /// Whether any strategy is legal; enumeration stops at the first.
    #[must_use]
    pub fn has_any(scenario: &Scenario, constraints: &Constraints) -> bool {
        let asked = Asked {
            scenario,
            constraints,
            present: None,
        };
        let mut illegal = BTreeMap::new();
        let mut found = Vec::new();
        meshes(asked, &mut illegal, &mut |mesh| found.push(mesh));
        found.into_iter().any(|mesh| {
            let layouts = layouts(asked, mesh, &mut illegal);
            layouts.iter().any(|layout| {
                let pipelines = asked.pipelines(layout.pp, layout.num_micro_batches);
                matches!(check(asked, layout, &pipelines), Checked::Legal(_))
            })
        })
    }

    /// The strategies of the space that do not use an axis.
    #[must_use]
    pub(crate) fn without(&self, axis: &str) -> Self {
        let mut constraints = self.constraints.clone();
        constraints.max.insert(axis.to_owned(), 1);
        let present = self.present.as_ref();
        Self::of(&self.scenario, &constraints, present, &|_| true)
    }

    /// Number of strategies.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.strategies
    }

    /// Whether the space has no strategy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.strategies == 0
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

    /// All numbers of pipeline ranks and micro-batches, with their pipelines.
    pub(crate) fn all_pipelines(&self) -> &BTreeMap<(u64, u64), Arc<Vec<PipelineChoice>>> {
        &self.pipelines
    }

    /// The ways to hold and shard states of a layout.
    #[must_use]
    pub fn shardings(&self, layout: &Layout) -> Vec<ShardingChoice> {
        self.asked().shardings(layout.dp, layout.cp)
    }

    /// The ways in which optimizer states may be held, the largest first; `None` is the runtime's own.
    pub(crate) fn optimizer_states(&self) -> Vec<Option<OptimizerStates>> {
        self.asked().optimizer_states()
    }

    /// For every ZeRO level, the way to shard a layout's states that leaves least on a rank, with the gradients of `base`
    /// and the smallest optimizer states.
    pub(crate) fn lightest(&self, layout: &Layout, base: &Decisions) -> Vec<Decisions> {
        let mut least: BTreeMap<_, ShardingChoice> = BTreeMap::new();
        for choice in self.shardings(layout) {
            let known = least
                .entry((choice.zero, choice.reshard_after_forward, choice.offload))
                .or_insert(choice);
            if choice.dp_replicate < known.dp_replicate {
                *known = choice;
            }
        }
        let smallest = self.optimizer_states().pop().flatten();
        let of_level = |choice: ShardingChoice| Decisions {
            gradients: base.gradients,
            optimizer_states: smallest
                .filter(|states| choice.zero != Zero::Z0 || !states.completes_parameters())
                .filter(|_| choice.offload.is_none()),
            ..choice.of(base)
        };
        least.into_values().map(of_level).collect()
    }

    /// The axis orders of a layout.
    #[must_use]
    pub fn orders(&self, layout: &Layout) -> &[AxisOrder] {
        self.asked().orders(layout.pp, layout.dp * layout.cp)
    }

    /// The decisions of a layout, with the smallest types of gradients, the usual values of all else that it leaves open,
    /// and no stages.
    #[must_use]
    pub fn decisions(&self, layout: &Layout) -> Decisions {
        decisions(self.asked(), layout)
    }

    /// Number of strategies of a layout with each pipeline and recomputation.
    pub(crate) fn beside(&self, layout: &Layout) -> u64 {
        (self.shardings(layout).len() * self.orders(layout).len()) as u64
    }

    /// Number of strategies of a layout.
    pub(crate) fn members(&self, layout: &Layout) -> u64 {
        let pipelines = self.pipelines(layout).iter();
        pipelines.map(|p| p.recompute.len()).sum::<usize>() as u64 * self.beside(layout)
    }

    /// All strategies of a layout.
    #[must_use]
    pub fn strategies(&self, layout: &Layout) -> Vec<Strategy> {
        let mut all = Vec::new();
        for pipeline in self.pipelines(layout).iter() {
            for &recompute in &pipeline.recompute {
                let d = with_pipeline(&self.decisions(layout), pipeline, recompute);
                all.extend(self.of_pipeline(layout, &d));
            }
        }
        all
    }

    /// All strategies with the pipeline and recomputation of `d`.
    pub(crate) fn of_pipeline(&self, layout: &Layout, d: &Decisions) -> Vec<Strategy> {
        let shardings = self.shardings(layout);
        let mut all = Vec::with_capacity(shardings.len() * self.orders(layout).len());
        for sharding in &shardings {
            for &axis_order in self.orders(layout) {
                all.push(self.with_sharding(d, sharding, axis_order));
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

    fn asked(&self) -> Asked<'_> {
        Asked {
            scenario: &self.scenario,
            constraints: &self.constraints,
            present: self.present.as_ref(),
        }
    }
}

/// The decisions with a pipeline and its recomputation.
pub(crate) fn with_pipeline(
    d: &Decisions,
    pipeline: &PipelineChoice,
    recompute: Recompute,
) -> Decisions {
    Decisions {
        schedule: pipeline.schedule,
        vpp: pipeline.vpp,
        stages: pipeline.stages.clone(),
        recompute,
        ..d.clone()
    }
}

fn decisions(asked: Asked<'_>, layout: &Layout) -> Decisions {
    Decisions {
        tp: layout.tp,
        pp: layout.pp,
        vpp: 1,
        cp: layout.cp,
        cp_kind: layout.cp_kind,
        ep: layout.ep,
        etp: layout.etp,
        dp_shard: 1,
        dp_replicate: layout.dp,
        zero: Zero::Z0,
        reshard_after_forward: false,
        sequence_parallel: layout.sequence_parallel,
        micro_batch: layout.micro_batch,
        num_micro_batches: layout.num_micro_batches,
        recompute: Recompute::None,
        schedule: ScheduleKind::OneFOneB,
        axis_order: (asked
            .orders(layout.pp, layout.dp * layout.cp)
            .first()
            .copied())
        .unwrap_or(AxisOrder::TP_CP_DP_PP),
        stages: StagePartition(Vec::new()),
        overlap: asked.scenario.runtime.overlap,
        gradients: asked.least_gradients(),
        optimizer_states: None,
        offload: None,
        offload_layers: asked.constraints.offload_layers(),
    }
}

/// The pipelines of so many ranks and micro-batches; those that are too long to be simulated are counted.
fn pipelines(
    asked: Asked<'_>,
    sizes: &[(u64, u64)],
    illegal: &mut BTreeMap<String, u64>,
) -> BTreeMap<(u64, u64), Arc<Vec<PipelineChoice>>> {
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

/// What came of a layout.
enum Checked {
    /// It has so many strategies.
    Legal(u64),
    /// It breaks a rule; so many combinations of other choices are left out with it.
    Illegal(&'static str, u64),
    /// Nothing combines with it.
    Empty,
}

/// Whether a layout and its pipelines are legal, and how many strategies they have. No rule concerns both a pipeline
/// and the way that states are sharded.
fn check(asked: Asked<'_>, layout: &Layout, pipelines: &[PipelineChoice]) -> Checked {
    let Asked { scenario, .. } = asked;
    let shardings = asked.shardings(layout.dp, layout.cp);
    let beside = (shardings.len() * asked.orders(layout.pp, layout.dp * layout.cp).len()) as u64;
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
    // Runtimes forbid layouts; the pipelines listed are those that they have.
    let any = with_pipeline(&base, pipeline, pipeline.recompute[0]);
    if allowed_by(&any, model, &scenario.runtime, workload.precision).is_err() {
        return Checked::Illegal("the runtime cannot express it", families);
    }
    let members: usize = pipelines.iter().map(|p| p.recompute.len()).sum();
    Checked::Legal(members as u64 * beside)
}

/// Enumerates the sizes of meshes; other fields of the layouts are yet to be decided.
fn meshes(asked: Asked<'_>, illegal: &mut BTreeMap<String, u64>, found: &mut dyn FnMut(Layout)) {
    let Asked {
        scenario,
        constraints,
        ..
    } = asked;
    let runtime = &scenario.runtime.space;
    let wanted = |mode: &RecomputeMode| constraints.allows_mode(*mode);
    if !runtime.recompute.iter().any(wanted) {
        return;
    }
    let gpus = scenario.workload.gpus;
    let model = &scenario.model;
    let domain = scenario.cluster.scale_up_domain;
    for tp in divisors(gpus).filter(|&tp| constraints.allows("tp", tp)) {
        let asked_for = constraints.fix.contains_key("tp")
            || constraints.min.get("tp").is_some_and(|&n| n > domain)
            || asked.present_size("tp") == Some(tp);
        if (tp > 1 && !runtime.tensor_parallel) || (tp > domain && !asked_for) {
            continue;
        }
        if !model.attention.heads.is_multiple_of(tp) {
            *(illegal.entry("tp does not divide the attention heads".to_owned())).or_default() += 1;
            continue;
        }
        for pp in divisors(gpus / tp).filter(|&pp| constraints.allows("pp", pp)) {
            let copies = asked.constraints.offload_layers() > 0;
            if pp > model.layers || (pp > 1 && (copies || runtime.schedules.is_empty())) {
                continue;
            }
            let pools = scenario.cluster.pools.as_ref();
            if pools.is_some_and(|pools| pools.of_pipeline(pp).is_none()) {
                let rule = "a pipeline rank would have GPUs of several pools".to_owned();
                *illegal.entry(rule).or_default() += 1;
                continue;
            }
            let rest = gpus / tp / pp;
            for cp in asked.with_fixed("cp", powers_of_two(rest)) {
                let impossible =
                    (cp > 1 && runtime.cp_kinds.is_empty()) || !rest.is_multiple_of(cp);
                if impossible || !constraints.allows("dp", rest / cp) {
                    continue;
                }
                let mesh = Layout {
                    tp,
                    pp,
                    cp,
                    dp: rest / cp,
                    ep: 1,
                    etp: 1,
                    micro_batch: 1,
                    num_micro_batches: 1,
                    cp_kind: CpKind::Ring,
                    sequence_parallel: false,
                };
                experts(asked, mesh, found);
            }
        }
    }
}

/// Enumerates how experts are spread over the ranks of a mesh.
fn experts(asked: Asked<'_>, mesh: Layout, found: &mut dyn FnMut(Layout)) {
    let constraints = asked.constraints;
    let Some(moe) = asked.scenario.model.moe else {
        if constraints.allows("ep", 1) && constraints.allows("etp", 1) {
            found(mesh);
        }
        return;
    };
    let ranks = mesh.tp * mesh.cp * mesh.dp;
    let parallel = asked.scenario.runtime.space.expert_parallel;
    let is_asked =
        |&key: &&str| constraints.fix.contains_key(key) || constraints.min.contains_key(key);
    let asked_for = ["ep", "etp"].iter().any(is_asked);
    for ep in divisors(moe.experts).filter(|&ep| constraints.allows("ep", ep)) {
        let tensor = [1, mesh.tp]
            .into_iter()
            .take(if mesh.tp == 1 { 1 } else { 2 });
        for etp in asked.with_fixed("etp", tensor) {
            let spread = ep.saturating_mul(etp);
            let impossible = (spread > 1 && !parallel) || !ranks.is_multiple_of(spread);
            let in_use = asked.present.is_some_and(|d| (d.ep, d.etp) == (ep, etp));
            if !impossible && (spread <= MAX_EXPERT_RANKS || asked_for || in_use) {
                found(Layout { ep, etp, ..mesh });
            }
        }
    }
}

/// Enumerates micro-batches, kinds of context parallelism and sequence parallelism of a mesh.
fn layouts(asked: Asked<'_>, mesh: Layout, illegal: &mut BTreeMap<String, u64>) -> Vec<Layout> {
    let batch = asked.scenario.workload.global_batch;
    if !batch.is_multiple_of(mesh.dp) {
        let rule = "data parallelism does not divide the global batch".to_owned();
        *illegal.entry(rule).or_default() += 1;
        return Vec::new();
    }
    let per_rank = batch / mesh.dp;
    let mut sizes = asked.with_fixed("mbs", powers_of_two(per_rank.min(MAX_MICRO_BATCH)));
    sizes.retain(|&b| per_rank.is_multiple_of(b));
    let space = &asked.scenario.runtime.space;
    let mut kinds: Vec<CpKind> = if mesh.cp == 1 {
        // Without context parallelism the kind is the one that a strategy has which names none.
        vec![space.cp_kinds.first().copied().unwrap_or(CpKind::Ring)]
    } else {
        space.cp_kinds.clone()
    };
    kinds.retain(|k| asked.constraints.allows_name("cp_kind", k.name()));
    let mut sequence: Vec<bool> = match (mesh.tp, space.sequence_parallel) {
        (1, _) | (_, SequenceParallelUse::Never) => vec![false],
        (_, SequenceParallelUse::Always) => vec![true],
        (_, SequenceParallelUse::Choice) => vec![true, false],
    };
    sequence.retain(|&on| asked.constraints.allows_name("sp", switch_name(on)));
    let mut all = Vec::with_capacity(sizes.len() * kinds.len() * sequence.len());
    for &micro_batch in &sizes {
        for &cp_kind in &kinds {
            for &sequence_parallel in &sequence {
                all.push(Layout {
                    micro_batch,
                    num_micro_batches: per_rank / micro_batch,
                    cp_kind,
                    sequence_parallel,
                    ..mesh
                });
            }
        }
    }
    all
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
