//! Lower bounds for all strategies that share a layout and a pipeline, whatever their sharding of states and their
//! axis order.
//!
//! A bound on a rank's time, or memory, is a sum over kinds of blocks of how often it runs, or holds, each. The counts
//! follow from the pipeline alone ([`Shape`]), the costs from the layout alone ([`LayoutBounds`]), so that a bound takes
//! a few multiplications. Ranks that another outweighs in every count are left out.

use std::sync::Arc;

use catalog::runtime::Rewrite;
use catalog::{AxisOrder, Bytes, Seconds};
use plans::{Decisions, Floors};

use crate::CostError;
use crate::assemble::{Blocks, Largest, in_flight};
use crate::block_cost::BlockCost;
use crate::blocks::BlockCosts;
use crate::floors::ROUNDING;
use crate::offload;
use crate::pipeline::Pipeline;
use crate::states::{Sharding, Weights};
use crate::traffic::DataParallel;

/// Kinds of blocks: embedding, head and prediction module, then for every class of layers those of which a stage's
/// first layers are (which `Recompute::Layers` recomputes), and the others.
const ENDS: usize = 3;
const EMBEDDING: usize = 0;
const HEAD: usize = 1;
const MTP: usize = 2;

/// How often the ranks of a pipeline run and hold each kind of block in a step. On a cluster of several pools a kind of
/// block on one pool is a kind of its own: the kinds of the first pool, then those of the second, and so on.
#[derive(Clone, Debug)]
pub struct Shape {
    times: Vec<Passes>,
    memory: Vec<Held>,
    /// The least that a rank has of every kind of block.
    least: Vec<u64>,
}

/// The ways to shard the states of a layout that leave least on a rank.
#[derive(Clone, Debug, Default)]
pub struct Lightest {
    /// Those with all states on devices, one for every ZeRO level.
    pub on_device: Vec<Decisions>,
    /// Those with states in host memory, one for every ZeRO level and everything that may lie there: of a level, those with
    /// less there come first.
    pub on_host: Vec<Decisions>,
}

/// Bounds on time and memory over a pipeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PipelineFloors {
    /// Lower bounds of every strategy of the pipeline that fits.
    pub floors: Floors,
    /// The part of the bound on time that no pass takes: the update by hosts, if no strategy fits that has all states on
    /// devices.
    pub on_host: Seconds,
}

/// A bound on the time of a step, as counts of passes.
#[derive(Clone, Debug)]
struct Passes {
    forward: Vec<f64>,
    backward: Vec<f64>,
    transfers: f64,
    part: Part,
}

/// What counts of backward passes are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Backward in one pass.
    Whole,
    /// The half that computes gradients of inputs.
    Input,
    /// Both halves, or one pass, whichever is shorter.
    All,
}

/// What a rank holds at its fullest moment.
#[derive(Clone, Debug)]
struct Held {
    saved: Vec<f64>,
    own: Vec<u64>,
    /// Outputs of stages.
    outputs: f64,
    /// The pool in which the rank lies.
    pool: usize,
}

impl Shape {
    /// The counts of a pipeline whose ranks lie in these of `pools` pools; of `d` it reads schedule, stages, micro-batches
    /// and recomputed layers.
    pub(crate) fn new(
        costs: &BlockCosts,
        d: &Decisions,
        pipeline: &Pipeline,
        pool_of_rank: &[usize],
        pools: usize,
    ) -> Self {
        let owners = &pipeline.rank_of_stage;
        let kinds = ENDS + 2 * costs.layer_classes().len();
        let placed = |without| {
            let pool_of_stage = owners.iter().map(|&rank| pool_of_rank[rank as usize]);
            of_pools(of_stages(costs, d, kinds, without), pool_of_stage, pools)
        };
        let stages = placed(0);
        let kept = match d.offload_layers {
            0 => None,
            on_host => Some(placed(on_host)),
        };
        let kept = kept.as_ref().unwrap_or(&stages);
        let kinds = kinds * pools;
        let ranks = d.pp as usize;
        let (own, paths) = paths(&stages, owners, ranks, kinds);
        let least = |kind: usize| own.iter().map(|own| own[kind]).min().unwrap_or_default();
        let mut shape = Self {
            times: Vec::new(),
            memory: Vec::new(),
            least: (0..kinds).map(least).collect(),
        };
        for rank in 0..ranks {
            let mut busy = vec![0u64; kinds];
            add(&mut busy, &own[rank], d.num_micro_batches);
            let path = paths[rank].clone().unwrap_or_default();
            shape.add_times(busy, path, pipeline.splits_backward);
            let mut saved = vec![0u64; kinds];
            let mut outputs = 0;
            for &(stage, count) in &pipeline.in_flight.ranks[rank] {
                add(&mut saved, &kept[stage as usize], u64::from(count));
                outputs += count;
            }
            shape.add_memory(Held {
                saved: floats(&saved),
                own: own[rank].clone(),
                outputs: f64::from(outputs),
                pool: pool_of_rank[rank],
            });
        }
        shape
    }

    /// Adds a rank that runs so many blocks of each kind, after a path through earlier ranks' blocks with so many transfers.
    fn add_times(&mut self, busy: Vec<u64>, (before, crossings): (Vec<u64>, u64), split: bool) {
        let own = floats(&busy);
        let mut whole = busy;
        add(&mut whole, &before, 1);
        let whole = floats(&whole);
        self.add_time(Passes {
            forward: whole.clone(),
            backward: whole.clone(),
            transfers: 2.0 * crossings as f64,
            part: if split { Part::Input } else { Part::Whole },
        });
        if split {
            self.add_time(Passes {
                forward: whole,
                backward: own,
                transfers: crossings as f64,
                part: Part::All,
            });
        }
    }

    fn add_time(&mut self, new: Passes) {
        let outweighs = |a: &Passes, b: &Passes| {
            a.part == b.part
                && a.transfers >= b.transfers
                && at_least(&a.forward, &b.forward)
                && at_least(&a.backward, &b.backward)
        };
        if !self.times.iter().any(|known| outweighs(known, &new)) {
            self.times.retain(|known| !outweighs(&new, known));
            self.times.push(new);
        }
    }

    fn add_memory(&mut self, new: Held) {
        let outweighs = |a: &Held, b: &Held| {
            a.pool == b.pool
                && a.outputs >= b.outputs
                && at_least(&a.saved, &b.saved)
                && at_least(&a.own, &b.own)
        };
        if !self.memory.iter().any(|known| outweighs(known, &new)) {
            self.memory.retain(|known| !outweighs(&new, known));
            self.memory.push(new);
        }
    }
}

/// For every virtual stage, its number of blocks of each kind, but for so many of its first layers.
fn of_stages(costs: &BlockCosts, d: &Decisions, kinds: usize, without: u64) -> Vec<Vec<u64>> {
    let last = d.stages.0.len() - 1;
    let mut first_layer = 0;
    let mut stages = Vec::with_capacity(d.stages.0.len());
    for (index, &count) in d.stages.0.iter().enumerate() {
        let mut counts = vec![0u64; kinds];
        let end = first_layer + count as usize;
        let layers = (0u64..).zip(&costs.class_of_layer()[first_layer..end]);
        for (offset, &class) in layers.skip(without as usize) {
            let as_first = d.recompute.of_layer(offset) == d.recompute.of_layer(0);
            counts[ENDS + 2 * usize::from(class) + usize::from(as_first)] += 1;
        }
        counts[EMBEDDING] = u64::from(index == 0);
        counts[HEAD] = u64::from(index == last);
        counts[MTP] = if index == last {
            costs.scenario().model.mtp_layers
        } else {
            0
        };
        first_layer = end;
        stages.push(counts);
    }
    stages
}

/// Widens the counts of every stage from the kinds of one pool to those of all pools, with zeros for the pools in which the
/// stage does not lie.
fn of_pools(
    stages: Vec<Vec<u64>>,
    pool_of_stage: impl Iterator<Item = usize>,
    pools: usize,
) -> Vec<Vec<u64>> {
    if pools == 1 {
        return stages;
    }
    let placed = |(counts, pool): (Vec<u64>, usize)| {
        let mut all = vec![0; counts.len() * pools];
        let first = counts.len() * pool;
        all[first..first + counts.len()].copy_from_slice(&counts);
        all
    };
    stages.into_iter().zip(pool_of_stage).map(placed).collect()
}

fn add(sums: &mut [u64], counts: &[u64], times: u64) {
    for (sum, count) in sums.iter_mut().zip(counts) {
        *sum += count * times;
    }
}

fn floats(counts: &[u64]) -> Vec<f64> {
    counts.iter().map(|&count| count as f64).collect()
}

fn at_least<T: PartialOrd>(a: &[T], b: &[T]) -> bool {
    a.iter().zip(b).all(|(a, b)| a >= b)
}

/// Costs of every kind of block under a layout, with the least that states take on it. On several pools the kinds of each
/// pool follow those of the one before, as in a [`Shape`].
#[derive(Clone, Debug)]
pub struct LayoutBounds {
    /// Seconds of forward on the device, and on the host.
    forward: [Vec<f64>; 2],
    /// Seconds of backward in one pass on the device, and on the host; then those of [`Part::Input`] and [`Part::All`].
    backward: [Vec<f64>; 4],
    saved: Vec<f64>,
    weights: Vec<Weights>,
    output: f64,
    transfer: f64,
    step: Seconds,
    outside: Bytes,
    /// Elements of the table that counts twice if one stage has both ends of the model.
    tied: u64,
    /// Ways to shard states that leave least on a rank, with none in host memory.
    least: Vec<(Decisions, Sharding)>,
    /// All ways to hold states in host memory: of a ZeRO level, those with less there come first.
    on_host: Vec<(Decisions, Sharding)>,
}

impl LayoutBounds {
    /// The costs of `blocks`, which are those of `d`; of its fields those are read that decide what blocks cost.
    /// `lightest` are the same decisions with the ways to shard states that leave least on a rank.
    pub(crate) fn new(
        costs: &BlockCosts,
        d: &Decisions,
        blocks: &Blocks,
        lightest: &Lightest,
        orders: &[AxisOrder],
    ) -> Result<Self, CostError> {
        let scenario = costs.scenario();
        let (embedding, head) = (Some(&blocks.embedding), Some(&blocks.head));
        let mut of_kind = vec![embedding, head, blocks.mtp.as_ref()];
        of_kind.extend(blocks.layers.iter().flatten().map(Some));
        let all = |value: &dyn Fn(&BlockCost) -> f64| -> Vec<f64> {
            let value = |block: &Option<&Arc<BlockCost>>| block.map_or(0.0, |block| value(block));
            of_kind.iter().map(value).collect()
        };
        let whole = |b: &BlockCost| (b.recompute + b.backward.whole).device().0;
        let input = |b: &BlockCost| (b.recompute + b.backward.input).device().0;
        let both = |b: &BlockCost| input(b) + b.backward.weight.device().0;
        let keeps_output = (scenario.runtime.rewrites).contains(&Rewrite::KeepStageOutput);
        let overheads = &scenario.runtime.overheads;
        let sharded = |ways: &[Decisions]| -> Vec<(Decisions, Sharding)> {
            let sharding = |d: &Decisions| DataParallel::new(d, &scenario.cluster).sharding;
            ways.iter().map(|d| (d.clone(), sharding(d))).collect()
        };
        let weights = |b: &Option<&Arc<BlockCost>>| b.map_or(Weights::default(), |b| b.weights);
        Ok(Self {
            forward: [all(&|b| b.forward.device().0), all(&|b| b.forward.host.0)],
            backward: [
                all(&whole),
                all(&|b| (b.recompute + b.backward.whole).host.0),
                all(&|b| input(b).min(whole(b))),
                all(&|b| both(b).min(whole(b))),
            ],
            saved: all(&|b| b.memory.saved_bytes.as_f64()),
            weights: of_kind.iter().map(weights).collect(),
            output: match d.pp > 1 && keeps_output {
                true => blocks.output().as_f64(),
                false => 0.0,
            },
            transfer: blocks.least_transfer(costs, d, orders)?.0,
            step: scenario.by_host(&overheads.step),
            outside: overheads.context.value + overheads.workspace.value,
            tied: tied(costs, d),
            least: sharded(&lightest.on_device),
            on_host: sharded(&lightest.on_host),
        })
    }

    /// The same with the blocks of one more pool.
    pub(crate) fn with_pool(mut self, other: Self) -> Self {
        let own = self.forward.iter_mut().chain(&mut self.backward);
        let others = other.forward.into_iter().chain(other.backward);
        for (own, other) in own.zip(others) {
            own.extend(other);
        }
        self.saved.extend(other.saved);
        self.weights.extend(other.weights);
        self.transfer = self.transfer.min(other.transfer);
        self
    }

    /// The bounds if every block may have the costs of either.
    pub(crate) fn or_least(mut self, other: &Self) -> Self {
        let own = self.forward.iter_mut().chain(&mut self.backward);
        let others = other.forward.iter().chain(&other.backward);
        for (own, other) in own.zip(others).chain([(&mut self.saved, &other.saved)]) {
            for (own, other) in own.iter_mut().zip(other) {
                *own = own.min(*other);
            }
        }
        self.transfer = self.transfer.min(other.transfer);
        self
    }

    /// A bound on memory over a pipeline, with all states on devices; `as_on_first` gives the bytes that a rank of a pool
    /// holds as the same share of the memory of the first pool's GPUs.
    pub(crate) fn least_memory(
        &self,
        costs: &BlockCosts,
        shape: &Shape,
        as_on_first: impl Fn(usize, Bytes) -> Bytes,
    ) -> Bytes {
        self.least_memory_of(costs, shape, as_on_first, self.least.iter())
    }

    /// Bounds over a pipeline with some states in host memory: on memory, and on the time that the hosts of all ranks take for
    /// their updates. `None` if no way to hold states there fits, where ranks are `alike` in what host they have.
    ///
    /// # Errors
    /// When the cluster's file does not describe the host.
    pub(crate) fn on_host(
        &self,
        costs: &BlockCosts,
        shape: &Shape,
        as_on_first: impl Fn(usize, Bytes) -> Bytes,
        alike: bool,
    ) -> Result<Option<(Bytes, Seconds)>, CostError> {
        let scenario = costs.scenario();
        let mut weights = Weights::default();
        for (of_block, &count) in self.weights.iter().zip(&shape.least) {
            weights += *of_block * count;
        }
        weights.share(self.tied);
        let fits = |(d, sharding): &&(Decisions, Sharding)| {
            !alike || !offload::overfills_host(scenario, d, sharding, weights, 1)
        };
        let ways: Vec<_> = self.on_host.iter().filter(fits).collect();
        let mut time: Option<Seconds> = None;
        for (d, sharding) in &ways {
            let step = offload::step(scenario, d, d.offload, sharding, weights)?;
            let step = step.total();
            time = Some(time.map_or(step, |least| least.min(step)));
        }
        Ok(time.map(|time| {
            let most = most_on_host(&ways, |way| &way.0).copied();
            (
                self.least_memory_of(costs, shape, as_on_first, most),
                time * ROUNDING,
            )
        }))
    }

    fn least_memory_of<'w>(
        &self,
        costs: &BlockCosts,
        shape: &Shape,
        as_on_first: impl Fn(usize, Bytes) -> Bytes,
        ways: impl Iterator<Item = &'w (Decisions, Sharding)> + Clone,
    ) -> Bytes {
        let memory = shape.memory.iter().map(|held| {
            let bytes = self.memory(costs, held, ways.clone());
            bytes.map_or(Bytes(u64::MAX), |bytes| {
                as_on_first(held.pool, costs.scenario().with_fragmentation(bytes))
            })
        });
        memory.max().unwrap_or_default()
    }

    /// A bound on time over a pipeline.
    pub(crate) fn least_time(&self, shape: &Shape) -> Seconds {
        let times = shape.times.iter().map(|passes| self.time(passes));
        (Seconds(times.fold(0.0, f64::max)) + self.step) * ROUNDING
    }

    fn time(&self, passes: &Passes) -> f64 {
        let [device, host] = &self.forward;
        let sent = passes.transfers * self.transfer;
        let forward = product(&passes.forward, device) + sent;
        match passes.part {
            Part::Whole => {
                let on_host = product(&passes.forward, host)
                    + product(&passes.backward, &self.backward[1])
                    + sent;
                on_host.max(forward + product(&passes.backward, &self.backward[0]))
            }
            Part::Input => forward + product(&passes.backward, &self.backward[2]),
            Part::All => forward + product(&passes.backward, &self.backward[3]),
        }
    }

    /// A bound on the memory of a rank, whichever of some ways to hold states is taken; `None` if there is no way.
    fn memory<'w>(
        &self,
        costs: &BlockCosts,
        held: &Held,
        ways: impl Iterator<Item = &'w (Decisions, Sharding)>,
    ) -> Option<Bytes> {
        let saved = product(&held.saved, &self.saved) + held.outputs * self.output;
        let mut weights = Weights::default();
        let mut largest = Largest::default();
        for (of_block, &count) in self.weights.iter().zip(&held.own) {
            weights += *of_block * count;
            if count > 0 {
                largest = largest.or(*of_block);
            }
        }
        weights.share(self.tied);
        let of_sharding = |(d, sharding): &(Decisions, Sharding)| {
            states(costs, d, sharding, weights) + in_flight(d, costs, largest, weights)
        };
        let least = ways.map(of_sharding).min()?;
        Some(Bytes((saved * ROUNDING) as u64) + self.outside + least)
    }
}

/// Of some ways, for every ZeRO level the one that keeps most in host memory.
fn most_on_host<'w, W>(
    ways: &'w [W],
    decisions: impl Fn(&W) -> &Decisions + Clone + 'w,
) -> impl Iterator<Item = &'w W> + Clone {
    let level = move |way: &W| {
        let d = decisions(way);
        (d.zero, d.reshard_after_forward)
    };
    let levels = ways.chunk_by(move |a, b| level(a) == level(b));
    levels.filter_map(<[W]>::last)
}

/// Elements of the embedding that count twice if one stage has both ends of a model that ties them.
fn tied(costs: &BlockCosts, d: &Decisions) -> u64 {
    let model = &costs.scenario().model;
    if model.tied_embeddings {
        dtensor::placement::chunk_size(model.vocab, d.tp) * model.hidden
    } else {
        0
    }
}

fn states(costs: &BlockCosts, d: &Decisions, sharding: &Sharding, weights: Weights) -> Bytes {
    offload::states_on_device(costs.scenario(), d, sharding, weights).total()
}

fn product(counts: &[f64], costs: &[f64]) -> f64 {
    counts
        .iter()
        .zip(costs)
        .map(|(count, cost)| count * cost)
        .sum()
}

/// The least memory that parameters, gradients and optimizer states take on the fullest rank, whatever blocks keep:
/// their average over the pipeline's ranks. It needs no prices. States lie in host memory only where they fit, if ranks are
/// `alike` in what host they have.
///
/// # Errors
/// When a block cannot be traced.
pub(crate) fn states_floor(
    costs: &BlockCosts,
    d: &Decisions,
    lightest: &Lightest,
    alike: bool,
) -> Result<Bytes, CostError> {
    let scenario = costs.scenario();
    let mut weights = costs.weights(d)?;
    weights.share(tied(costs, d));
    let sharding = |d: &Decisions| DataParallel::new(d, &scenario.cluster).sharding;
    let fits = |way: &&Decisions| {
        !alike || !offload::overfills_host(scenario, way, &sharding(way), weights, d.pp)
    };
    let on_host: Vec<&Decisions> = lightest.on_host.iter().filter(fits).collect();
    let ways = lightest.on_device.iter();
    let ways = ways.chain(most_on_host(&on_host, |way| way).copied());
    let least = ways.map(|d| states(costs, d, &sharding(d), weights)).min();
    let overheads = &scenario.runtime.overheads;
    let outside = overheads.context.value + overheads.workspace.value;
    Ok(least.map_or(Bytes(u64::MAX), |least| {
        scenario.with_fragmentation(Bytes(least.0 / d.pp) + outside)
    }))
}

/// What every rank's stages hold, and for each rank what lies before its first stage, with the transfers on the way there.
#[expect(
    clippy::type_complexity,
    reason = "both are made in one pass and taken apart at once"
)]
fn paths(
    stages: &[Vec<u64>],
    owners: &[u32],
    ranks: usize,
    kinds: usize,
) -> (Vec<Vec<u64>>, Vec<Option<(Vec<u64>, u64)>>) {
    let mut own = vec![vec![0u64; kinds]; ranks];
    let mut paths: Vec<Option<(Vec<u64>, u64)>> = vec![None; ranks];
    let mut path = (vec![0u64; kinds], 0);
    for (stage, counts) in stages.iter().enumerate() {
        let owner = owners[stage] as usize;
        path.1 += u64::from(stage > 0 && owners[stage - 1] as usize != owner);
        if paths[owner].is_none() {
            paths[owner] = Some(path.clone());
        }
        add(&mut own[owner], counts, 1);
        add(&mut path.0, counts, 1);
    }
    (own, paths)
}
