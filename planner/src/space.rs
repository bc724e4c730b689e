//! The finite space of strategies that a search covers.
//!
//! Stated: tensor parallelism over divisors of the heads within a scale-up domain; context
//! parallelism over powers of two; pipeline ranks over divisors of the world, as many as layers;
//! expert sizes over divisors of the experts; micro-batches over powers of two up to 16 sequences;
//! virtual stages over divisors of the layers per rank; recompute counts over eighths of a stage;
//! stages even (a remainder spread over the middle without virtual stages), or lighter at the ends by
//! up to `uneven` layers; experts spread over at most 64 ranks; hybrid sharding over powers of two.
//! A size that a constraint fixes is tried even if it lies outside these ranges.
//! A decision that does not change a step (context kind without context parallelism, axis order without a pipeline,
//! ZeRO without data parallelism) has only one value, so that every strategy counts once.

use catalog::runtime::{RecomputeMode, SequenceParallelUse};
use catalog::{AxisOrder, CpKind, ScheduleKind, Zero};
use costmodel::Scenario;
use plans::legality::allowed_by;
use plans::{Decisions, Recompute, StagePartition, Strategy};
use rayon::prelude::*;
use std::collections::BTreeMap;

use crate::constraints::{Constraints, switch_name, zero_name};

/// Largest number of sequences in a micro-batch.
const MAX_MICRO_BATCH: u64 = 16;
/// Largest number of ranks over which one copy of the experts is spread, unless a constraint asks for more.
const MAX_EXPERT_RANKS: u64 = 64;
/// Largest number of virtual stages per rank.
const MAX_VPP: u64 = 16;

/// Strategies that differ only in what they recompute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Family {
    /// The strategy that recomputes nothing. Its floor is a lower bound on every member's time.
    pub base: Strategy,
    /// The recompute choices of the members, in order.
    pub recompute: Vec<Recompute>,
}

/// The space of strategies, grouped into families.
#[derive(Clone, Debug, Default)]
pub struct SearchSpace {
    /// The families in order of enumeration, which breaks ties.
    pub families: Vec<Family>,
    /// Combinations of sizes left out, counted by the rule that excludes them.
    pub illegal: BTreeMap<String, u64>,
}

impl SearchSpace {
    /// Enumerates every legal strategy of a scenario under constraints.
    #[must_use]
    pub fn new(scenario: &Scenario, constraints: &Constraints) -> Self {
        let builder = || Builder::new(scenario, constraints, false);
        let mut sizes = builder();
        sizes.meshes();
        let of_mesh = |&mesh: &Mesh| {
            let mut builder = builder();
            builder.batches(mesh);
            builder.space
        };
        let parts: Vec<Self> = sizes.meshes.par_iter().map(of_mesh).collect();
        let mut space = sizes.space;
        let families = parts.iter().map(|part| part.families.len()).sum();
        space.families.reserve_exact(families);
        for part in parts {
            space.families.extend(part.families);
            for (rule, count) in part.illegal {
                *space.illegal.entry(rule).or_default() += count;
            }
        }
        space
    }

    /// Whether any strategy is legal; enumeration stops at the first.
    #[must_use]
    pub fn has_any(scenario: &Scenario, constraints: &Constraints) -> bool {
        let mut builder = Builder::new(scenario, constraints, true);
        builder.meshes();
        for mesh in std::mem::take(&mut builder.meshes) {
            builder.batches(mesh);
            if builder.done() {
                return true;
            }
        }
        false
    }

    /// Number of strategies.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.families.iter().map(|f| f.recompute.len() as u64).sum()
    }

    /// Whether the space has no strategy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.families.is_empty()
    }
}

impl Family {
    /// The member of this family with a recompute choice; `None` if it is not legal.
    #[must_use]
    pub fn member(&self, scenario: &Scenario, recompute: Recompute) -> Option<Strategy> {
        let decisions = Decisions {
            recompute,
            ..self.base.decisions().clone()
        };
        Strategy::new(decisions, &scenario.model, &scenario.workload).ok()
    }
}

struct Builder<'a> {
    scenario: &'a Scenario,
    constraints: &'a Constraints,
    /// Whether enumeration may stop at the first family.
    only_first: bool,
    /// The meshes to enumerate, in order.
    meshes: Vec<Mesh>,
    space: SearchSpace,
}

/// The mesh sizes, which are decided before everything else.
#[derive(Clone, Copy)]
struct Mesh {
    tp: u64,
    pp: u64,
    cp: u64,
    dp: u64,
    ep: u64,
    etp: u64,
}

impl<'a> Builder<'a> {
    fn new(scenario: &'a Scenario, constraints: &'a Constraints, only_first: bool) -> Self {
        Self {
            scenario,
            constraints,
            only_first,
            meshes: Vec::new(),
            space: SearchSpace::default(),
        }
    }

    /// Whether enumeration may stop.
    fn done(&self) -> bool {
        self.only_first && !self.space.families.is_empty()
    }

    /// These sizes and any that constraints fix for `key`, less those that constraints exclude.
    fn with_fixed(&self, key: &str, sizes: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut sizes: Vec<u64> = sizes.collect();
        for size in self.constraints.fixed(key) {
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
        sizes.retain(|&size| self.constraints.allows(key, size));
        sizes
    }

    fn exclude(&mut self, rule: &str) {
        *self.space.illegal.entry(rule.to_owned()).or_default() += 1;
    }

    fn meshes(&mut self) {
        let offered = &self.scenario.runtime.space.recompute;
        let wanted = |mode: &RecomputeMode| self.constraints.allows_mode(*mode);
        if !offered.iter().any(wanted) {
            return;
        }
        let gpus = self.scenario.workload.gpus;
        let model = &self.scenario.model;
        let domain = self.scenario.cluster.scale_up_domain;
        let runtime = &self.scenario.runtime.space;
        for tp in divisors(gpus).filter(|&tp| self.constraints.allows("tp", tp)) {
            if tp > 1 && !runtime.tensor_parallel {
                continue;
            }
            let asked = self.constraints.fix.contains_key("tp")
                || self.constraints.min.get("tp").is_some_and(|&n| n > domain);
            if tp > domain && !asked {
                continue;
            }
            if !model.attention.heads.is_multiple_of(tp) {
                self.exclude("tp does not divide the attention heads");
                continue;
            }
            for pp in divisors(gpus / tp).filter(|&pp| self.constraints.allows("pp", pp)) {
                if pp > model.layers || (pp > 1 && runtime.schedules.is_empty()) {
                    continue;
                }
                let rest = gpus / tp / pp;
                for cp in self.with_fixed("cp", powers_of_two(rest)) {
                    if cp > 1 && runtime.cp_kinds.is_empty() {
                        continue;
                    }
                    if !rest.is_multiple_of(cp) || !self.constraints.allows("dp", rest / cp) {
                        continue;
                    }
                    self.experts(Mesh {
                        tp,
                        pp,
                        cp,
                        dp: rest / cp,
                        ep: 1,
                        etp: 1,
                    });
                }
            }
        }
    }

    fn experts(&mut self, mesh: Mesh) {
        let Some(moe) = self.scenario.model.moe else {
            self.meshes.push(mesh);
            return;
        };
        let ranks = mesh.tp * mesh.cp * mesh.dp;
        let parallel = self.scenario.runtime.space.expert_parallel;
        for ep in divisors(moe.experts).filter(|&ep| self.constraints.allows("ep", ep)) {
            let tensor = [1, mesh.tp]
                .into_iter()
                .take(if mesh.tp == 1 { 1 } else { 2 });
            for etp in self.with_fixed("etp", tensor) {
                let spread = ep.saturating_mul(etp);
                if spread > 1 && !parallel {
                    continue;
                }
                let asked = ["ep", "etp"].iter().any(|&key| {
                    self.constraints.fix.contains_key(key) || self.constraints.min.contains_key(key)
                });
                if !ranks.is_multiple_of(spread) || (spread > MAX_EXPERT_RANKS && !asked) {
                    continue;
                }
                self.meshes.push(Mesh { ep, etp, ..mesh });
            }
        }
    }

    fn batches(&mut self, mesh: Mesh) {
        let batch = self.scenario.workload.global_batch;
        if !batch.is_multiple_of(mesh.dp) {
            self.exclude("data parallelism does not divide the global batch");
            return;
        }
        let per_rank = batch / mesh.dp;
        let mut sizes = self.with_fixed("mbs", powers_of_two(per_rank.min(MAX_MICRO_BATCH)));
        sizes.retain(|&b| per_rank.is_multiple_of(b));
        for micro_batch in sizes {
            if self.done() {
                return;
            }
            for (zero, reshard, replicate) in self.sharding(mesh) {
                for (schedule, vpp) in self.schedules(mesh, per_rank / micro_batch) {
                    for stages in self.partitions(mesh.pp, vpp) {
                        let base = Decisions {
                            tp: mesh.tp,
                            pp: mesh.pp,
                            vpp,
                            cp: mesh.cp,
                            cp_kind: CpKind::Ring,
                            ep: mesh.ep,
                            etp: mesh.etp,
                            dp_shard: if zero == Zero::Z0 {
                                1
                            } else {
                                mesh.dp / replicate
                            },
                            dp_replicate: if zero == Zero::Z0 { mesh.dp } else { replicate },
                            zero,
                            reshard_after_forward: reshard,
                            sequence_parallel: false,
                            micro_batch,
                            num_micro_batches: per_rank / micro_batch,
                            recompute: Recompute::None,
                            schedule,
                            axis_order: AxisOrder::TP_CP_DP_PP,
                            stages,
                            overlap: self.scenario.runtime.overlap,
                        };
                        self.layouts(base);
                    }
                }
            }
        }
    }

    /// Combinations of ZeRO level, resharding after forward, and number of replicas.
    fn sharding(&self, mesh: Mesh) -> Vec<(Zero, bool, u64)> {
        if mesh.dp * mesh.cp == 1 {
            let allowed = self.constraints.allows_name("zero", zero_name(Zero::Z0));
            return allowed
                .then_some((Zero::Z0, false, 1))
                .into_iter()
                .collect();
        }
        let space = &self.scenario.runtime.space;
        let mut choices = Vec::new();
        for &zero in &space.zero {
            if !self.constraints.allows_name("zero", zero_name(zero)) {
                continue;
            }
            if zero == Zero::Z0 {
                choices.push((zero, false, 1));
                continue;
            }
            let mut replicas: Vec<u64> = if space.hybrid_shard && mesh.dp > 1 {
                self.with_fixed("dp_replicate", powers_of_two(mesh.dp / 2))
            } else {
                vec![1]
            };
            if space.hybrid_shard {
                for shard in self.constraints.fixed("dp_shard") {
                    replicas.extend(mesh.dp.is_multiple_of(shard).then_some(mesh.dp / shard));
                }
            }
            replicas.retain(|&r| {
                mesh.dp.is_multiple_of(r)
                    && self.constraints.allows("dp_shard", mesh.dp / r)
                    && self.constraints.allows("dp_replicate", r)
            });
            replicas.sort_unstable();
            replicas.dedup();
            for replicate in replicas {
                choices.push((zero, zero == Zero::Z3, replicate));
                if zero == Zero::Z3 && space.keep_after_forward {
                    choices.push((zero, false, replicate));
                }
            }
        }
        choices
    }

    fn schedules(&self, mesh: Mesh, micro_batches: u64) -> Vec<(ScheduleKind, u64)> {
        if mesh.pp == 1 {
            let kind = ScheduleKind::OneFOneB;
            let allowed = self.constraints.allows_name("schedule", kind.name())
                && self.constraints.allows("vpp", 1);
            return allowed.then_some((kind, 1)).into_iter().collect();
        }
        let per_rank = self.scenario.model.layers.div_ceil(mesh.pp);
        let mut choices = Vec::new();
        for &kind in &self.scenario.runtime.space.schedules {
            if !self.constraints.allows_name("schedule", kind.name()) {
                continue;
            }
            for vpp in self.with_fixed("vpp", 1..=per_rank.min(MAX_VPP)) {
                let legal = plans::schedule::check(kind, mesh.pp, vpp, micro_batches).is_ok();
                let fills = !self.partitions(mesh.pp, vpp).is_empty();
                if fills && legal {
                    choices.push((kind, vpp));
                }
            }
        }
        choices
    }

    fn partitions(&self, pp: u64, vpp: u64) -> Vec<StagePartition> {
        let layers = self.scenario.model.layers;
        let stages = pp * vpp;
        let uneven = self.scenario.runtime.space.uneven_stages;
        let mut partitions = Vec::new();
        let even = StagePartition::even(layers, stages);
        // An uneven remainder is spread over the middle only without virtual stages; with them the ends take fewer
        // layers.
        if even.is_uniform() || (uneven && stages == pp) {
            partitions.push(even);
        }
        if uneven && stages > 1 {
            let limit = self.constraints.uneven.unwrap_or(1);
            for first in 0..=limit {
                for last in 0..=limit {
                    if let Some(p) = StagePartition::lighter_ends(layers, stages, first, last)
                        && !partitions.contains(&p)
                    {
                        partitions.push(p);
                    }
                }
            }
        }
        partitions
    }

    /// Enumerates context kind, sequence parallelism and axis order, then the recompute choices.
    fn layouts(&mut self, base: Decisions) {
        let space = self.scenario.runtime.space.clone();
        let mut kinds: Vec<CpKind> = if base.cp == 1 {
            vec![CpKind::Ring]
        } else {
            space.cp_kinds.clone()
        };
        kinds.retain(|k| self.constraints.allows_name("cp_kind", k.name()));
        let sequence: Vec<bool> = match (base.tp, space.sequence_parallel) {
            (1, _) | (_, SequenceParallelUse::Never) => vec![false],
            (_, SequenceParallelUse::Always) => vec![true],
            (_, SequenceParallelUse::Choice) => vec![true, false],
        };
        let one_order = base.pp == 1 || base.dp() * base.cp == 1;
        let orders: Vec<AxisOrder> = if one_order {
            space.axis_orders.iter().copied().take(1).collect()
        } else {
            space.axis_orders.clone()
        };
        for &cp_kind in &kinds {
            for &sequence_parallel in &sequence {
                if !self
                    .constraints
                    .allows_name("sp", switch_name(sequence_parallel))
                {
                    continue;
                }
                for &axis_order in &orders {
                    let decisions = Decisions {
                        cp_kind,
                        sequence_parallel,
                        axis_order,
                        ..base.clone()
                    };
                    self.family(decisions);
                }
            }
        }
    }

    fn family(&mut self, decisions: Decisions) {
        if self.done() {
            return;
        }
        let (model, workload) = (&self.scenario.model, &self.scenario.workload);
        // Final check: whatever was enumerated, every strategy returned satisfies all constraints.
        if !self.constraints.allow_but_recompute(&decisions) {
            return;
        }
        let mut recompute = self.recompute(&decisions);
        recompute.retain(|&recompute| self.constraints.allow_recompute(recompute));
        if recompute.is_empty() {
            return;
        }
        let base = match Strategy::new(decisions, model, workload) {
            Ok(base) => base,
            Err(error) => {
                let rule = rule(&error);
                self.exclude(rule);
                return;
            }
        };
        let family = Family { base, recompute };
        let allowed = |member: &Strategy| allowed_by(member, model, &self.scenario.runtime).is_ok();
        // The base itself may be forbidden: it only bounds the members.
        let is_allowed = match family.recompute.first() {
            None => return,
            Some(Recompute::None) => allowed(&family.base),
            Some(&first) => family
                .member(self.scenario, first)
                .is_some_and(|m| allowed(&m)),
        };
        if is_allowed {
            self.space.families.push(family);
        } else {
            self.exclude("the runtime cannot express it");
        }
    }

    fn recompute(&self, d: &Decisions) -> Vec<Recompute> {
        let most = d.stages.0.iter().copied().max().unwrap_or(0);
        let mut choices = Vec::new();
        for &offered in &self.scenario.runtime.space.recompute {
            match offered {
                RecomputeMode::None => choices.push(Recompute::None),
                RecomputeMode::Selective => choices.push(Recompute::Selective),
                RecomputeMode::Full => choices.push(Recompute::Full),
                RecomputeMode::SelectiveOps => choices.push(Recompute::SelectiveOps),
                RecomputeMode::Layers => {
                    let step = most.div_ceil(8).max(1);
                    let mut counts: Vec<u64> =
                        (1..).map(|i| i * step).take_while(|&n| n < most).collect();
                    counts.extend(self.constraints.fixed_layers().filter(|&n| n <= most));
                    counts.sort_unstable();
                    counts.dedup();
                    choices.extend(counts.into_iter().map(Recompute::Layers));
                }
            }
        }
        choices
    }
}

/// Short name of the rule that a strategy breaks, as a key for counting.
fn rule(error: &plans::StrategyError) -> &'static str {
    use plans::StrategyError as E;
    match error {
        E::Divides { what, .. } => what,
        E::Schedule(_) => "the schedule does not exist for these sizes",
        E::Stages { .. } => "layers do not fill the stages",
        E::Batch { .. } => "the global batch does not come out",
        E::Passes { .. } => "more passes of micro-batches through stages than are simulated",
        E::Elements { .. } => "a tensor has more elements than are counted",
        E::Conflict(why) => why,
        E::Zero { .. } | E::World { .. } | E::Runtime { .. } | E::Syntax(_) => "sizes do not match",
    }
}

pub(crate) fn divisors(n: u64) -> impl Iterator<Item = u64> {
    let small: Vec<u64> = (1..=n.isqrt()).filter(|d| n.is_multiple_of(*d)).collect();
    let large: Vec<u64> = small
        .iter()
        .rev()
        .map(|d| n / d)
        .filter(|d| d * d > n)
        .collect();
    small.into_iter().chain(large)
}

pub(crate) fn powers_of_two(most: u64) -> impl Iterator<Item = u64> {
    (0..63)
        .map(|i| 1u64 << i)
        .take_while(move |&p| p <= most.max(1))
}
