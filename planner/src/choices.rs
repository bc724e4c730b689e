//! Choices within one layout: pipelines, states and their sharding, axis orders, recomputation.

use catalog::runtime::{RecomputeMode, RuntimeSpace};
use catalog::{
    GradientTypes, Offload, OffloadKind, OptimizerStates, ScheduleKind, Selection, Zero,
};
use costmodel::Scenario;
use plans::legality::MAX_PASSES;
use plans::{Decisions, Recompute, StagePartition};

use crate::constraints::{Constraints, prefetch_name, sizes, zero_name};
use crate::holders::Holders;

/// Largest number of virtual stages per rank.
const MAX_VPP: u64 = 16;
/// Number of parts of a stage's layers: recomputation and activation offload take whole parts.
const PARTS: u64 = 8;
/// Percentages of a rank's weights whose optimizer states may be in host memory, where the runtime
/// can keep a part of them there.
const OFFLOADED: [u8; 4] = [25, 50, 75, 100];

/// A pipeline: its schedule, its stages, and the choices for their activations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineChoice {
    /// Schedule of passes.
    pub schedule: ScheduleKind,
    /// Virtual stages per rank.
    pub vpp: u64,
    /// Layers of every virtual stage.
    pub stages: StagePartition,
    /// The choices for what layers save for backward, in order; never empty.
    pub activations: Vec<ActivationChoice>,
}

/// A choice for what layers save for backward: recomputed, kept, or copied to host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationChoice {
    /// What backward computes again instead of keeping it.
    pub recompute: Recompute,
    /// Number of layers whose saved activations are in host memory.
    pub offload_layers: u64,
}

/// A way to hold states and shard them over data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardingChoice {
    /// Which states are sharded.
    pub zero: Zero,
    /// Under ZeRO-3, whether parameters are freed between forward and backward.
    pub reshard_after_forward: bool,
    /// Number of ranks over which states are sharded.
    pub dp_shard: u64,
    /// Number of replicas of the sharded states.
    pub dp_replicate: u64,
    /// Types in which gradients are held and reduced; `None`: the runtime's own.
    pub gradients: Option<GradientTypes>,
    /// How optimizer states are held; `None`: the runtime's default.
    pub optimizer_states: Option<OptimizerStates>,
    /// States that are in host memory; `None`: none.
    pub offload: Option<Offload>,
    /// How many blocks ahead parameters are gathered; `None`: the runtime's default.
    pub prefetch: Option<u64>,
}

impl ShardingChoice {
    /// The decisions with states sharded in this way.
    #[must_use]
    pub fn of(self, d: &Decisions) -> Decisions {
        Decisions {
            zero: self.zero,
            reshard_after_forward: self.reshard_after_forward,
            dp_shard: self.dp_shard,
            dp_replicate: self.dp_replicate,
            gradients: self.gradients,
            optimizer_states: self.optimizer_states,
            offload: self.offload,
            prefetch: self.prefetch,
            ..d.clone()
        }
    }
}

/// A scenario under constraints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) constraints: &'a Constraints,
    /// A strategy in use. Its values are tried too, even outside the usual ranges.
    pub(crate) present: Option<&'a Decisions>,
    /// Whether to try every number of layers to recompute or to copy to the host, not just eighths.
    pub(crate) every_number: bool,
}

impl<'a> Asked<'a> {
    /// A scenario under constraints, without a strategy in use.
    pub(crate) fn new(scenario: &'a Scenario, constraints: &'a Constraints) -> Self {
        Self {
            scenario,
            constraints,
            present: None,
            every_number: false,
        }
    }
}

impl Asked<'_> {
    /// The usual sizes, those that constraints fix for `key`, and that of the present strategy;
    /// without those that constraints exclude.
    pub(crate) fn with_fixed(&self, key: &str, usual: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut sizes: Vec<u64> = usual.collect();
        for size in self.constraints.fixed(key).chain(self.present_size(key)) {
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
        sizes.retain(|&size| self.constraints.allows(key, size));
        sizes
    }

    /// The present strategy's size of a dimension; sizes of sharding have none under ZeRO-0.
    pub(crate) fn present_size(&self, key: &str) -> Option<u64> {
        let present = self.present?;
        let of_states = key == "dp_shard" || key == "dp_replicate";
        let mut all = sizes(present).into_iter();
        all.find(|&(k, _)| k == key && !(of_states && present.zero == Zero::Z0))
            .map(|(_, size)| size)
    }

    /// All pipelines with this many ranks and micro-batches that are short enough to simulate.
    pub(crate) fn pipelines(&self, pp: u64, micro_batches: u64) -> Vec<PipelineChoice> {
        let mut choices = Vec::new();
        let simulated = |&(_, vpp): &(_, u64)| pp * vpp * micro_batches <= MAX_PASSES;
        let schedules = self.schedules(pp, micro_batches).into_iter();
        for (schedule, vpp) in schedules.filter(simulated) {
            for stages in self.partitions(schedule, pp, vpp) {
                let layers = self.scenario.model.layers;
                let pipeline = Decisions {
                    pp,
                    vpp,
                    num_micro_batches: micro_batches,
                    schedule,
                    stages,
                    ..Decisions::on_one_gpu(layers, self.scenario.runtime.overlap)
                };
                let activations = self.activations(&pipeline);
                if !activations.is_empty() {
                    choices.push(PipelineChoice {
                        schedule,
                        vpp,
                        stages: pipeline.stages,
                        activations,
                    });
                }
            }
        }
        choices
    }

    /// Number of schedules left out because they have more passes than are simulated.
    pub(crate) fn too_long(&self, pp: u64, micro_batches: u64) -> u64 {
        let schedules = self.schedules(pp, micro_batches).into_iter();
        let too_long = |&(_, vpp): &(_, u64)| pp * vpp * micro_batches > MAX_PASSES;
        schedules.filter(too_long).count() as u64
    }

    fn schedules(&self, pp: u64, micro_batches: u64) -> Vec<(ScheduleKind, u64)> {
        if pp == 1 {
            let kind = ScheduleKind::OneFOneB;
            let allowed = self.constraints.allows_name("schedule", kind.name())
                && self.constraints.allows("vpp", 1);
            return allowed.then_some((kind, 1)).into_iter().collect();
        }
        let per_rank = self.scenario.model.layers.div_ceil(pp);
        let mut choices = Vec::new();
        let space = &self.scenario.runtime.space;
        for &kind in &space.schedules {
            if !self.constraints.allows_name("schedule", kind.name()) {
                continue;
            }
            for vpp in self.with_fixed("vpp", 1..=per_rank.min(MAX_VPP)) {
                let filled = micro_batches >= space.fewest_micro_batches(kind, pp);
                if filled && plans::schedule::check(kind, pp, vpp, micro_batches).is_ok() {
                    choices.push((kind, vpp));
                }
            }
        }
        choices
    }

    /// Whether layers may be divided unevenly between pools with `vpp` stages per rank: if `vpp` is
    /// a power of two, fixed by a constraint, or in use.
    fn may_differ_by_pool(&self, vpp: u64) -> bool {
        let mut asked_for = self
            .constraints
            .fixed("vpp")
            .chain(self.present_size("vpp"));
        vpp.is_power_of_two() || asked_for.any(|of| of == vpp)
    }

    /// Ways to divide layers over a pipeline's stages: by pool, evenly, lighter ends, as in use.
    fn partitions(&self, schedule: ScheduleKind, pp: u64, vpp: u64) -> Vec<StagePartition> {
        let layers = self.scenario.model.layers;
        let stages = pp * vpp;
        if stages == 1 {
            return vec![StagePartition::even(layers, 1)];
        }
        let uneven = self.scenario.runtime.space.uneven_stages;
        let present = self.present.map(|d| &d.stages);
        let present = present.filter(|p| p.0.len() as u64 == stages && p.layers() == layers);
        let pools = self.scenario.cluster.pools.as_ref();
        let pools = pools.and_then(|pools| pools.of_pipeline(pp));
        let mut partitions = match pools {
            Some(owners) if uneven && self.may_differ_by_pool(vpp) => {
                let ranks = plans::schedule::rank_of_stage(schedule, pp, vpp);
                StagePartition::by_pool(layers, &owners, &ranks)
            }
            _ => Vec::new(),
        };
        let mut add = |partition: StagePartition| {
            if !partitions.contains(&partition) {
                partitions.push(partition);
            }
        };
        let even = StagePartition::even(layers, stages);
        // An uneven remainder is spread over the middle only without virtual stages; with them the ends take fewer
        // layers.
        if even.is_uniform() || (uneven && stages == pp) {
            add(even);
        }
        if uneven {
            let limit = self.constraints.uneven.unwrap_or(1);
            let ends = (0..=limit).flat_map(|first| (0..=limit).map(move |last| (first, last)));
            ends.filter_map(|(first, last)| {
                StagePartition::lighter_ends(layers, stages, first, last)
            })
            .for_each(&mut add);
        }
        let present = present.filter(|present| uneven || present.is_uniform());
        present.cloned().into_iter().for_each(add);
        partitions
    }

    /// What may become of the activations of a pipeline's stages: recomputation or, without
    /// recomputation and on one stage, copies in host memory.
    fn activations(&self, pipeline: &Decisions) -> Vec<ActivationChoice> {
        let mut all = Vec::new();
        if self.constraints.allows_name("offload_layers", "0") {
            let recompute = self.recompute(pipeline).into_iter();
            all.extend(recompute.map(|recompute| ActivationChoice {
                recompute,
                offload_layers: 0,
            }));
        }
        let space = &self.scenario.runtime.space;
        let recompute = Recompute::None;
        if let [layers] = pipeline.stages.0[..]
            && space.offload_layers
            && self.constraints.allow_recompute(recompute)
        {
            let present = self.present.map(|d| d.offload_layers);
            let usual = self.numbers(layers);
            let usual = usual.filter(|_| self.scenario.cluster.has_hosts());
            let asked_for = self.constraints.fixed("offload_layers").chain(present);
            let mut counts: Vec<u64> = usual.chain(asked_for).collect();
            counts.retain(|&n| {
                let name = n.to_string();
                n > 0 && n < layers && self.constraints.allows_name("offload_layers", &name)
            });
            counts.sort_unstable();
            counts.dedup();
            all.extend(counts.into_iter().map(|offload_layers| ActivationChoice {
                recompute,
                offload_layers,
            }));
        }
        all
    }

    fn recompute(&self, pipeline: &Decisions) -> Vec<Recompute> {
        let most = pipeline.stages.0.iter().copied().max().unwrap_or(0);
        let mut choices = Vec::new();
        for &offered in &self.scenario.runtime.space.recompute {
            match offered {
                RecomputeMode::None => choices.push(Recompute::None),
                RecomputeMode::Selective => {
                    choices.push(Recompute::Selective);
                    choices.extend(self.selections().into_iter().map(Recompute::Modules));
                }
                RecomputeMode::Full => choices.push(Recompute::Full),
                RecomputeMode::SelectiveOps => choices.push(Recompute::SelectiveOps),
                RecomputeMode::Layers => {
                    let counts = self.recomputed_layers("layers:", most, |of| match of {
                        Recompute::Layers(n) => Some(n),
                        _ => None,
                    });
                    choices.extend(counts.map(Recompute::Layers));
                }
                RecomputeMode::Falling => choices.extend(self.falling(pipeline)),
            }
        }
        choices.retain(|&recompute| self.constraints.allow_recompute(recompute));
        choices
    }

    /// The numbers of layers, below `layers`, that a search tries when no constraint names one: eighths, or every number.
    fn numbers(&self, layers: u64) -> impl Iterator<Item = u64> + use<> {
        steps(layers, if self.every_number { layers } else { PARTS })
    }

    /// Numbers of layers that a stage of `most` layers may recompute: the usual ones, those that
    /// constraints fix after `prefix` (`layers:`, `falling:`), and that of the present strategy.
    fn recomputed_layers(
        &self,
        prefix: &str,
        most: u64,
        of: fn(Recompute) -> Option<u64>,
    ) -> impl Iterator<Item = u64> + use<> {
        let present = self.present.and_then(|d| of(d.recompute));
        let asked_for = self.constraints.fixed_layers(prefix).chain(present);
        let mut counts: Vec<u64> = self.numbers(most).collect();
        counts.extend(asked_for.filter(|&n| n > 0 && n <= most));
        counts.sort_unstable();
        counts.dedup();
        counts.into_iter()
    }

    /// `falling:N` choices, but for those that equal another choice.
    fn falling(&self, pipeline: &Decisions) -> Vec<Recompute> {
        let counts = self.recomputed_layers("falling:", pipeline.stages.0[0], |of| match of {
            Recompute::Falling(n) => Some(n),
            _ => None,
        });
        let counted = |recompute| {
            let d = Decisions {
                recompute,
                ..pipeline.clone()
            };
            let legal = plans::legality::check_recompute(&d).is_ok();
            legal.then(|| d.recomputed_layers())
        };
        let mut choices = Vec::new();
        let mut known = Vec::new();
        for n in counts {
            let counts = counted(Recompute::Falling(n));
            if counts.is_some()
                && counts != counted(Recompute::Layers(n))
                && !known.contains(&counts)
            {
                choices.push(Recompute::Falling(n));
                known.push(counts);
            }
        }
        choices
    }

    /// Sets of parts of layers to recompute other than the runtime's own set: those that the
    /// runtime lists, those that constraints fix, and that of the present strategy.
    fn selections(&self) -> Vec<Selection> {
        let runtime = &self.scenario.runtime;
        let mut all = runtime.selections_of(&self.scenario.model);
        let present = match self.present.map(|d| d.recompute) {
            Some(Recompute::Modules(selection)) => Some(selection),
            _ => None,
        };
        let of_parts = |value: &str| Selection::read(value.strip_prefix("selective:")?);
        let fixed = self.constraints.read_fixed("recompute", of_parts);
        for asked_for in fixed.chain(present) {
            let has_part = !asked_for.of_model(&self.scenario.model).is_empty();
            let possible = has_part && asked_for.and(runtime.modules()) == asked_for;
            if possible && asked_for != runtime.selective && !all.contains(&asked_for) {
                all.push(asked_for);
            }
        }
        all
    }

    /// All ways to shard states over the ranks that hold them; `dp_replicate` divides `groups`.
    pub(crate) fn shardings(&self, holders: Holders) -> Vec<ShardingChoice> {
        let Holders {
            dp,
            cp,
            groups,
            pipelined,
            alone,
        } = holders;
        let zero_0 = ShardingChoice {
            zero: Zero::Z0,
            reshard_after_forward: false,
            dp_shard: 1,
            dp_replicate: dp,
            gradients: None,
            optimizer_states: None,
            offload: None,
            prefetch: None,
        };
        let (runtime, workload) = (&self.scenario.runtime, &self.scenario.workload);
        let space = &runtime.space;
        let needs_shards = workload.gpus > dp * cp && runtime.casts_only_shards(workload.precision);
        let allows = |choice: &ShardingChoice| {
            let c = self.constraints;
            !(needs_shards && choice.dp_shard * cp == 1)
                && c.allows_name("zero", zero_name(choice.zero))
                && c.allows("dp_shard", choice.dp_shard)
                && c.allows("dp_replicate", choice.dp_replicate)
                && c.allows_name("prefetch", &prefetch_name(choice.prefetch))
        };
        let mut choices = Vec::new();
        if alone {
            choices.push(zero_0);
        }
        // A rank that shares its states with none has a ZeRO level only if it offloads some.
        if !alone || self.offloads().iter().any(Option::is_some) {
            let replicas = self.replicas(dp, groups);
            for zero in space.zero_levels(if pipelined { 2 } else { 1 }) {
                if zero == Zero::Z0 {
                    choices.extend((!alone).then_some(zero_0));
                    continue;
                }
                for &dp_replicate in &replicas {
                    let choice = ShardingChoice {
                        zero,
                        reshard_after_forward: zero == Zero::Z3,
                        dp_shard: dp / dp_replicate,
                        dp_replicate,
                        ..zero_0
                    };
                    choices.extend(with_gathers(choice, space));
                }
            }
        }
        choices.retain(allows);
        choices
            .into_iter()
            .flat_map(|choice| self.with_types(choice))
            .filter(|choice| !alone || (choice.zero == Zero::Z0) == choice.offload.is_none())
            .collect()
    }

    /// Copies of a sharding choice, one for each combination of element types and offload that the search may choose.
    fn with_types(&self, choice: ShardingChoice) -> Vec<ShardingChoice> {
        let unsharded = choice.zero == Zero::Z0;
        // Plain data parallelism reduces the gradients of 32-bit parameters in 32 bits, whatever is asked.
        let runtime = &self.scenario.runtime;
        let plain = unsharded && !runtime.works_by_block(choice.zero);
        let fixed = plain && runtime.states.parameter.is_some();
        let precision = self.scenario.workload.precision;
        let unavailable = |types: GradientTypes| {
            let mut others = runtime.other_gradients_at(choice.zero, precision);
            fixed || others.all(|other| other != types)
        };
        let offered = |offload: &Option<Offload>| {
            offload.is_none_or(|offload| runtime.offload_option(offload, choice.zero).is_some())
        };
        let mut all = Vec::new();
        for offload in self.offloads().into_iter().filter(offered) {
            for optimizer_states in self.optimizer_states() {
                // The host's optimizer holds its states in one way.
                let impossible = |states: OptimizerStates| {
                    unsharded && states.completes_parameters() || offload.is_some()
                };
                for gradients in self.gradients() {
                    let possible = !(gradients.is_some_and(unavailable)
                        || optimizer_states.is_some_and(impossible));
                    all.extend(possible.then_some(ShardingChoice {
                        gradients,
                        optimizer_states,
                        offload,
                        ..choice
                    }));
                }
            }
        }
        all
    }

    /// Choices of states in host memory, smallest first; `None` keeps none there. Without a
    /// constraint, all that the runtime offers if the cluster's hosts are known.
    pub(crate) fn offloads(&self) -> Vec<Option<Offload>> {
        let mut all = vec![None];
        if let Some(values) = self.constraints.fix.get("offload") {
            let of_name = |name: &String| match name.as_str() {
                Offload::NONE => Some(None),
                name => Offload::read(name).map(Some),
            };
            all = values.iter().filter_map(of_name).collect();
        } else {
            let runtime = &self.scenario.runtime.space;
            let has_hosts = self.scenario.cluster.has_hosts();
            for option in runtime.offload.iter().filter(|_| has_hosts) {
                match option.states {
                    OffloadKind::Optimizer if option.partly => {
                        all.extend(OFFLOADED.map(|percent| Some(Offload::Optimizer(percent))));
                    }
                    OffloadKind::Optimizer => all.push(Some(Offload::Optimizer(100))),
                    OffloadKind::Parameters => all.push(Some(Offload::Parameters)),
                }
            }
            all.extend(self.present.and_then(|d| d.offload).map(Some));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The ways in which optimizer states may be held, the largest first; `None` is the runtime's own.
    pub(crate) fn optimizer_states(&self) -> Vec<Option<OptimizerStates>> {
        let precision = self.scenario.workload.precision;
        let others = self.scenario.runtime.other_optimizers(precision);
        let others = others.into_iter().map(Some);
        let mut all: Vec<Option<OptimizerStates>> = [None].into_iter().chain(others).collect();
        let name = |states: Option<OptimizerStates>| {
            states.map_or(OptimizerStates::OWN, OptimizerStates::name)
        };
        all.retain(|&states| self.constraints.allows_name("optim_states", name(states)));
        all
    }

    /// The types in which gradients may be held and reduced; `None` are the runtime's own.
    pub(crate) fn gradients(&self) -> Vec<Option<GradientTypes>> {
        let (runtime, precision) = (&self.scenario.runtime, self.scenario.workload.precision);
        let others = runtime.other_gradients(precision).map(Some);
        let mut all: Vec<Option<GradientTypes>> = [None].into_iter().chain(others).collect();
        let name =
            |types: Option<GradientTypes>| types.unwrap_or(runtime.own_gradients(precision)).name();
        all.retain(|&types| self.constraints.allows_name("grad_dtype", &name(types)));
        all
    }

    /// The smallest types in which gradients may be held and reduced, which take least time and
    /// memory. `None`: the runtime's own.
    pub(crate) fn least_gradients(&self) -> Option<GradientTypes> {
        let (runtime, precision) = (&self.scenario.runtime, self.scenario.workload.precision);
        let own = runtime.own_gradients(precision);
        let all = self.gradients().into_iter();
        let least = all
            .map(|types| types.unwrap_or(own))
            .reduce(GradientTypes::least);
        least.filter(|types| *types != own)
    }

    fn replicas(&self, dp: u64, groups: u64) -> Vec<u64> {
        let hybrid = self.scenario.runtime.space.hybrid_shard;
        let mut replicas: Vec<u64> = if hybrid && dp > 1 {
            self.with_fixed("dp_replicate", divisors(dp).filter(|&r| r < dp))
        } else {
            vec![1]
        };
        if hybrid {
            let present = self.present_size("dp_shard");
            for shard in self.constraints.fixed("dp_shard").chain(present) {
                replicas.extend(dp.is_multiple_of(shard).then_some(dp / shard));
            }
        }
        replicas.retain(|&r| groups.is_multiple_of(r));
        replicas.sort_unstable();
        replicas.dedup();
        replicas
    }
}

/// Variants of a way to shard states: one for each way that the runtime can gather parameters.
fn with_gathers(
    choice: ShardingChoice,
    space: &RuntimeSpace,
) -> impl Iterator<Item = ShardingChoice> {
    let in_every_pass = choice.reshard_after_forward;
    let depths = space.prefetch.iter().filter(move |_| in_every_pass);
    let depths = depths.map(|option| Some(option.blocks));
    let kept = (in_every_pass && space.keep_after_forward).then_some(ShardingChoice {
        reshard_after_forward: false,
        ..choice
    });
    let ahead = depths.map(move |prefetch| ShardingChoice { prefetch, ..choice });
    [choice].into_iter().chain(ahead).chain(kept)
}

/// Numbers of layers below `layers`, an eighth of it apart.
pub(crate) fn eighths(layers: u64) -> impl Iterator<Item = u64> {
    steps(layers, PARTS)
}

/// Numbers from 1 to `layers - 1`, evenly spaced so that they divide the layers into at most `parts` parts.
fn steps(layers: u64, parts: u64) -> impl Iterator<Item = u64> {
    let step = layers.div_ceil(parts.max(1)).max(1);
    (1..)
        .map(move |i| i * step)
        .take_while(move |&n| n < layers)
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
