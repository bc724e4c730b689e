//! Turns a simulated strategy into a detailed prediction: where its time goes, what its memory holds, what it rests on.

use std::collections::BTreeMap;

use catalog::calibration::Rate;
use catalog::residuals::{Evidence, Residual};
use catalog::runtime::{Overheads, Rewrite};
use catalog::{
    Bytes, Cluster, CudaGraphs, DType, FlopRate, Origin, Reach, Seconds, Sourced, elementary,
};
use plans::program::Program;
use plans::{
    Action, ActionKind, Fit, HostMemory, MemoryItem, NamedTime, Prediction, Strategy, UsedConstant,
};

use crate::assemble::Assembled;
use crate::block_cost::{BlockDetail, BlockKey};
use crate::blocks::BlockCosts;
use crate::breakdown::Parts;
use crate::engine::{Outcome, RankOutcome};
use crate::known::{self, Feature};
use crate::pools::PoolCosts;
use crate::states;
use crate::{Scenario, flops, graphed};

/// A simulated strategy: what was simulated, and what came out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Simulated<'a> {
    /// The work and memory of its stages and ranks.
    pub assembled: &'a Assembled,
    /// The times and peak memory that the engine found.
    pub outcome: &'a Outcome,
    /// The action lists of the whole step.
    pub program: &'a Program,
    /// The time and memory of the model's blocks on each pool of the cluster.
    pub pools: &'a PoolCosts,
    /// For every pipeline rank, the index of the pool in which it lies.
    pub pool_of_rank: &'a [usize],
    /// For every pool, the kernels and tensors of the blocks that run in it.
    pub details: &'a [BTreeMap<BlockKey, BlockDetail>],
}

impl Simulated<'_> {
    /// The scenario of the pool in which a pipeline rank runs; its cluster has that pool's GPUs and networks.
    fn scenario(&self, rank: usize) -> &Scenario {
        self.pools.all()[self.pool_of_rank[rank]].scenario()
    }
}

/// How far a predicted step time may be off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Errors {
    /// The 80% interval of `ln(measured / predicted)`.
    pub time: Residual,
    /// Upper end of the 80% interval of `ln(measured / predicted)` for the ratio of two step times.
    pub ratio: f64,
}

/// Builds the detailed prediction of a simulated strategy.
#[must_use]
pub(crate) fn prediction(
    scenario: &Scenario,
    strategy: &Strategy,
    simulated: &Simulated<'_>,
    errors: Errors,
) -> Prediction {
    let outcome = simulated.outcome;
    let step = outcome.step_time;
    let gpus = scenario.workload.gpus as f64;
    let at_once = scenario.cluster.at_once(scenario.workload.gpus) as f64;
    let tokens = scenario.workload.real_tokens_per_step();
    let peak_rate = scenario
        .cluster
        .peak_rate(scenario.workload.precision.matmul())
        .expect("checked when the cost model was made");
    let model_flops = flops::per_token(&scenario.model, &scenario.workload);
    let at_peak = step.0 * at_once * peak_rate.0;
    let capacity = |rank: usize| simulated.scenario(rank).capacity();
    let peak_rank = heaviest(simulated);
    let peaks = outcome.ranks.iter().map(|r| r.peak);
    let by_rank: Vec<Bytes> = peaks
        .map(|peak| scenario.with_fragmentation(peak))
        .collect();
    let peak = by_rank[peak_rank];
    let memory = memory_items(scenario, strategy, simulated, peak_rank as u32);
    let parts = Parts::of(simulated.assembled, simulated.program, outcome);
    let (pools, pool_of_rank) = (simulated.pools, simulated.pool_of_rank);
    let host_memory = pools.host_memory(pool_of_rank, &simulated.assembled.ranks);
    let (shortest, longest) = errors.time.around(step.0);
    let (least, most) = scenario.memory_error().around(peak.as_f64());
    Prediction {
        step_time: step,
        step_time_interval: (Seconds(shortest), Seconds(longest)),
        ratio_error: errors.ratio,
        tokens_per_s_per_gpu: tokens / step.0 / gpus,
        mfu: model_flops.once.0 * tokens / at_peak,
        mfu_palm: model_flops.palm.0 * tokens / at_peak,
        peak_flop_rate: FlopRate(peak_rate.0 * (at_once / gpus)),
        peak_memory: peak,
        peak_memory_interval: (Bytes(least as u64), Bytes(most as u64)),
        p_fits: match host_memory.fits() {
            true => scenario.p_fits(pools.as_on_first(pool_of_rank[peak_rank], peak)),
            false => 0.0,
        },
        host_memory,
        evidence: scenario.evidence_in_words(strategy),
        peak_rank: peak_rank as u32,
        peak_moment: moment(&outcome.ranks[peak_rank]),
        fit: fit(capacity(peak_rank), peak, &memory, host_memory),
        memory_by_rank: by_rank,
        usable_by_rank: (0..outcome.ranks.len()).map(capacity).collect(),
        memory,
        breakdown: parts.of_step(outcome),
        kernels: kernels(simulated, strategy, parts.critical()),
        provenance: provenance(scenario, strategy, pools.all(), errors.time),
    }
}

/// The rank whose peak takes the largest share of its memory.
fn heaviest(simulated: &Simulated<'_>) -> usize {
    let ranks = &simulated.outcome.ranks;
    let share = |rank: usize| {
        let capacity = simulated.scenario(rank).capacity();
        ranks[rank].peak.as_f64() / capacity.as_f64()
    };
    (0..ranks.len())
        .max_by(|&a, &b| share(a).total_cmp(&share(b)).then(b.cmp(&a)))
        .expect("there is a rank")
}

fn fit(capacity: Bytes, peak: Bytes, memory: &[MemoryItem], host: HostMemory) -> Fit {
    if let Some(there) = host.there.filter(|_| !host.fits() && peak <= capacity) {
        return Fit::TooLarge {
            over: host.used - there,
            largest: "states in the memory of a node's host".to_owned(),
        };
    }
    if peak <= capacity {
        return Fit::Fits {
            spare: capacity - peak,
        };
    }
    Fit::TooLarge {
        over: peak - capacity,
        largest: largest(memory),
    }
}

/// Name of saved activations. The memory item of each saved tensor begins with it.
const SAVED: &str = "saved activations";

/// The largest part of a peak, all saved activations being one part; `memory` is sorted, the largest item first.
fn largest(memory: &[MemoryItem]) -> String {
    let (saved, others): (Vec<_>, Vec<_>) =
        (memory.iter()).partition(|item| item.name.starts_with(SAVED));
    let sizes = saved.iter().map(|item| item.bytes);
    let saved = sizes.fold(0, u64::saturating_add);
    match others.first() {
        Some(item) if item.bytes > saved => item.name.clone(),
        _ => SAVED.to_owned(),
    }
}

/// The moment of memory that is in use during the whole step.
const WHOLE: &str = "whole step";

/// When a rank's memory is at its peak.
fn moment(rank: &RankOutcome) -> String {
    rank.peak_action
        .map_or_else(|| WHOLE.to_owned(), |action| action.to_string())
}

fn memory_items(
    scenario: &Scenario,
    strategy: &Strategy,
    simulated: &Simulated<'_>,
    index: u32,
) -> Vec<MemoryItem> {
    let rank = &simulated.outcome.ranks[index as usize];
    let at_peak = moment(rank);
    let item = |name: &str, bytes: Bytes, moment: &str| MemoryItem {
        name: name.to_owned(),
        bytes: bytes.0,
        rank: index,
        moment: moment.to_owned(),
    };
    let overheads = &scenario.runtime.overheads;
    let in_flight = simulated.assembled.ranks[index as usize].in_flight;
    let held = states_at_peak(scenario, strategy, simulated, index).chain([
        ("gathered parameters and gradients in flight", in_flight),
        ("context", overheads.context.value),
        ("workspaces and communicators", scenario.libraries()),
    ]);
    let mut items: Vec<MemoryItem> = held.map(|(name, bytes)| item(name, bytes, WHOLE)).collect();
    let [buffers, sent] = passed_on(simulated, rank.peak_action, index);
    items.push(item("receive buffers of pipeline stages", buffers, WHOLE));
    items.push(item(
        "tensors that pipeline stages have sent",
        sent,
        &at_peak,
    ));
    let saved = saved_activations(simulated, rank.peak_action, index);
    items.extend((saved.iter()).map(|(name, &bytes)| item(name, bytes, &at_peak)));
    let named: Bytes = items.iter().map(|item| Bytes(item.bytes)).sum();
    let reserved = scenario.with_fragmentation(rank.peak);
    items.extend([
        item("temporaries", rank.peak.saturating_sub(named), &at_peak),
        item(
            "allocator rounding and fragmentation",
            reserved.saturating_sub(rank.peak),
            WHOLE,
        ),
    ]);
    items.retain(|item| item.bytes > 0);
    items.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.name.cmp(&b.name)));
    items
}

/// Names and bytes of the states that a rank holds at its peak, and of gradients that do not exist then but whose memory stays
/// reserved.
fn states_at_peak(
    scenario: &Scenario,
    strategy: &Strategy,
    simulated: &Simulated<'_>,
    index: u32,
) -> impl Iterator<Item = (&'static str, Bytes)> {
    let rank = &simulated.outcome.ranks[index as usize];
    let mut held = simulated.assembled.ranks[index as usize].states;
    let mut kept = Bytes(0);
    if rank.peak_action.is_none_or(|a| a.kind != ActionKind::Optim) {
        let late = states::late_gradients(&scenario.runtime, strategy, &held);
        held.gradients -= late.free + late.kept;
        kept = late.kept;
    }
    let freed = ("freed gradients, held by the allocator", kept);
    held.named().into_iter().chain([freed])
}

/// Bytes of activations held while an action runs, by tensor name.
fn saved_activations(
    simulated: &Simulated<'_>,
    peak: Option<Action>,
    rank: u32,
) -> BTreeMap<String, Bytes> {
    let mut saved: BTreeMap<String, Bytes> = BTreeMap::new();
    let details = &simulated.details[simulated.pool_of_rank[rank as usize]];
    for (stage, held) in held_at(simulated.program, rank, peak) {
        let runs = simulated.assembled.runs(stage as usize).iter();
        for run in runs.filter(|run| !run.on_host) {
            for (tensor, bytes) in &details[&run.cost.key].saved {
                let name = format!("{SAVED}: {tensor}");
                *saved.entry(name).or_default() += *bytes * (run.count * u64::from(held));
            }
        }
    }
    saved
}

/// What a rank's stages hold while the action `peak` runs: bytes of their receive buffers, without inputs that are counted as saved
/// activations, and bytes of tensors that they have sent and keep until the step ends.
fn passed_on(simulated: &Simulated<'_>, peak: Option<Action>, rank: u32) -> [Bytes; 2] {
    let of_stage = |stage: u32| simulated.assembled.stage(stage as usize).passed_on;
    let stages = &simulated.assembled.pipeline.stages_of_rank[rank as usize];
    let all: Bytes = stages.iter().map(|&stage| of_stage(stage).buffers).sum();
    let held = held_at(simulated.program, rank, peak).into_iter();
    let in_use: Bytes = held
        .map(|(stage, count)| of_stage(stage).input * u64::from(count))
        .sum();
    let actions = simulated.program.ranks[rank as usize].iter();
    let before = actions.take_while(|&&action| peak.is_some_and(|peak| action != peak));
    let sent = before.map(|action| match action.kind {
        ActionKind::F => of_stage(action.stage).after_forward,
        ActionKind::B | ActionKind::I => of_stage(action.stage).after_backward,
        _ => Bytes(0),
    });
    [all.saturating_sub(in_use), sent.sum()]
}

/// For each stage, the number of micro-batches whose activations are held while an action runs; a forward counts its
/// own.
fn held_at(program: &Program, rank: u32, peak: Option<Action>) -> BTreeMap<u32, u32> {
    let mut held: BTreeMap<u32, u32> = BTreeMap::new();
    let Some(peak) = peak else { return held };
    for &action in &program.ranks[rank as usize] {
        if action.kind == ActionKind::F {
            *held.entry(action.stage).or_default() += 1;
        }
        if action == peak {
            break;
        }
        if matches!(action.kind, ActionKind::B | ActionKind::I)
            && let Some(count) = held.get_mut(&action.stage)
        {
            *count -= 1;
        }
    }
    held
}

/// Time per step of the critical rank's kernels and collectives, by name.
fn kernels(simulated: &Simulated<'_>, strategy: &Strategy, rank: usize) -> Vec<NamedTime> {
    let assembled = simulated.assembled;
    let details = &simulated.details[simulated.pool_of_rank[rank]];
    let mut times: BTreeMap<&str, f64> = BTreeMap::new();
    for (stage, &owner) in assembled.rank_of_stage().iter().enumerate() {
        if owner as usize == rank {
            for run in assembled.runs(stage) {
                let repeats = run.count as f64 * strategy.num_micro_batches as f64;
                for kernel in &details[&run.cost.key].kernels {
                    *times.entry(kernel.name.as_str()).or_default() += kernel.seconds * repeats;
                }
            }
        }
    }
    let mut list: Vec<NamedTime> = times
        .into_iter()
        .map(|(name, seconds)| NamedTime {
            name: name.to_owned(),
            seconds,
        })
        .collect();
    list.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then(a.name.cmp(&b.name)));
    list
}

/// Provenance rows of a runtime's overheads; those of only some runtimes are left out if zero.
fn of_runtime(overheads: &Overheads) -> Vec<UsedConstant> {
    let mut used = vec![
        constant("host time per kernel", &overheads.launch),
        constant("host time per step", &overheads.step),
        constant("time per byte of gradients", &overheads.gradient_byte),
        constant("time per pipeline transfer", &overheads.transfer),
        constant("memory outside the allocator", &overheads.context),
        constant("workspaces of libraries", &overheads.workspace),
        constant("communicators of several GPUs", &overheads.communicators),
        constant("reserved over allocated memory", &overheads.fragmentation),
        constant("slow-down beside collectives", &overheads.overlap_slowdown),
    ];
    if overheads.optimizer_bytes.value > 0.0 {
        used.push(constant(
            "bytes that the optimizer moves per element",
            &overheads.optimizer_bytes,
        ));
    }
    let times = [
        (
            "host time to update one tensor",
            &overheads.optimizer_tensor,
        ),
        (
            "host time to gather one gradient for clipping",
            &overheads.whole_gradient,
        ),
        (
            "host time of DTensor for one linear layer in a pass",
            &overheads.parallel_linear,
        ),
    ];
    let spent = times
        .into_iter()
        .filter(|(_, time)| time.value > Seconds(0.0));
    used.extend(spent.map(|(name, time)| constant(name, time)));
    used
}

fn provenance(
    scenario: &Scenario,
    strategy: &Strategy,
    pools: &[BlockCosts],
    time: Residual,
) -> Vec<UsedConstant> {
    let overheads = &scenario.runtime.overheads;
    let mut used = Vec::new();
    for pool in pools {
        let of_pool = of_cluster(&pool.scenario().cluster, &scenario.runtime.name);
        used.extend(named(of_pool, pool, pools));
    }
    used.extend(of_runtime(overheads));
    if let Some(link) = (scenario.cluster.pools.as_ref()).and_then(|pools| pools.between.as_ref()) {
        used.push(constant("bandwidth between pools", &link.bandwidth));
        used.push(constant("latency between pools", &link.latency));
    }
    for pool in pools {
        used.extend(named(of_strategy(pool.scenario(), strategy), pool, pools));
    }
    for pool in pools {
        let peaks = pool.scenario().cluster.device.peak.iter();
        let peaks = peaks
            .map(|(dtype, rate)| constant(&format!("dense peak, {dtype:?}").to_lowercase(), rate));
        used.extend(named(peaks.collect(), pool, pools));
    }
    used.push(interval(
        "80% interval of step time",
        time,
        scenario.time_evidence(strategy).0,
        &scenario.evidence_in_words(strategy),
    ));
    used.push(interval(
        "80% interval of peak memory",
        scenario.memory_error(),
        scenario.evidence(),
        &scenario
            .evidence()
            .words(&scenario.kind(), Reach::default()),
    ));
    for pool in pools {
        used.extend(named(pool.book.provenance(), pool, pools));
    }
    used
}

/// The constants that the prediction of this strategy uses because of features that not all have: offload to host memory, moments
/// in 8 bits, CUDA graphs of a whole step, and others.
fn of_strategy(scenario: &Scenario, strategy: &Strategy) -> Vec<UsedConstant> {
    let on_host = strategy.offload.is_some() || strategy.offload_layers > 0;
    let moments = strategy
        .state_types(&scenario.runtime, scenario.workload.precision)
        .momentum;
    let graphed_step = graphed::priced(scenario, strategy) == CudaGraphs::Step;
    let rewrites = &scenario.runtime.rewrites;
    let experts = scenario.model.moe.is_some();
    let mut used = known::rows_of_strategy(|feature| match feature {
        Feature::Host => on_host,
        Feature::EightBits => moments == DType::U8,
        Feature::ByTensor => rewrites.contains(&Rewrite::OptimizerByTensor),
        Feature::Bucketed => states::buckets_after_backward(scenario, strategy),
        Feature::GraphedStep => graphed_step,
        Feature::PortableExperts => experts && rewrites.contains(&Rewrite::PortableExperts),
        Feature::ExpertsApart => experts && rewrites.contains(&Rewrite::LaunchExpertsApart),
        Feature::PciExpress => scenario.cluster.pci_express,
        Feature::SplitProducts => strategy.overlap.tensor_parallel,
    });
    if let Some(host) = scenario.cluster.host.as_ref().filter(|_| on_host) {
        used.push(constant("link of a device to its host", &host.link));
        let bandwidth = &host.memory_bandwidth;
        used.push(constant("memory bandwidth of a host", bandwidth));
        used.extend(host.memory.iter().map(|m| constant("memory of a host", m)));
    }
    used
}

/// Constants of a pool, with the name of its cluster if there are several pools.
fn named(
    mut used: Vec<UsedConstant>,
    pool: &BlockCosts,
    pools: &[BlockCosts],
) -> Vec<UsedConstant> {
    if pools.len() > 1 {
        for constant in &mut used {
            constant.name = format!("{}: {}", pool.scenario().cluster.name, constant.name);
        }
    }
    used
}

fn of_cluster(cluster: &Cluster, runtime: &str) -> Vec<UsedConstant> {
    let device = &cluster.device;
    let mut used = vec![
        constant("device memory", &device.memory),
        constant("device memory bandwidth", &device.memory_bandwidth),
        constant("scale-up bandwidth per device", &cluster.scale_up.bandwidth),
        constant(
            "scale-out bandwidth per device",
            &cluster.scale_out.bandwidth,
        ),
    ];
    let shares = [
        (
            "computing speed, relative to the built-in tables",
            &cluster.speed,
        ),
        ("jitter of a rank's passes", &cluster.jitter),
    ];
    for (name, share) in shares {
        used.extend(share.as_ref().map(|share| constant(name, share)));
    }
    if let Some(learned) = &cluster.calibration {
        let factors = learned.factors(runtime);
        used.extend(Rate::ALL.iter().map(|&rate| UsedConstant {
            name: format!(
                "{} time of this system, relative to the prediction",
                rate.name()
            ),
            value: format!("{:.3}", factors.of(rate)),
            origin: Origin::Measured,
            source: learned.source.clone(),
        }));
    }
    used
}

/// The 80% interval of a quantity, with what it rests on.
pub(crate) fn interval(
    name: &str,
    found: Residual,
    evidence: Evidence,
    words: &str,
) -> UsedConstant {
    let percent = |log: f64| (elementary::exp(log) - 1.0) * 100.0;
    let [low, high] = [found.low, found.high].map(percent);
    let origin = match found.runs {
        0 => Origin::Assumed,
        _ => Origin::Fitted,
    };
    let source = format!("{words}; {}", evidence.errors(found.runs));
    known::constant(name, format!("{low:+.0}% to {high:+.0}%"), origin, &source)
}

/// A number of a cluster or runtime, with its evidence.
pub(crate) fn constant<T: std::fmt::Display>(name: &str, sourced: &Sourced<T>) -> UsedConstant {
    known::constant(
        name,
        sourced.value.to_string(),
        sourced.origin,
        &sourced.source,
    )
}
