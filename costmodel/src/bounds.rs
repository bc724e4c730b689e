//! Lower bounds for all strategies that share a layout and a pipeline, whatever their sharding of states and their
//! axis order.
//!
//! A bound on a rank's time adds up, over kinds of blocks, how often the rank runs each times its
//! cost; one on memory, how many it holds. Counts follow from the pipeline alone ([`Shape`]), costs
//! from the layout alone ([`LayoutBounds`]), so a bound takes a few multiplications.

use std::sync::Arc;

use catalog::runtime::Rewrite;
use catalog::{AxisOrder, Bytes, Seconds};
use models::BlockClass;
use plans::{Decisions, Floors};

use crate::CostError;
use crate::block_cost::BlockCost;
use crate::block_set::Blocks;
use crate::blocks::BlockCosts;
use crate::crossings::Way;
use crate::floors::ROUNDING;
use crate::message_bounds::{Added, Kernels, Level, Messages, product};
use crate::of_rank::{Largest, in_flight};
use crate::offload;
use crate::passed_on;
use crate::shape::{Held, Part, Passes, Shape};
use crate::shared_tables;
use crate::states::{self, Sharding, Weights};
use crate::traffic::DataParallel;

/// For one layout, the ways to shard states that leave the fewest bytes on a rank.
#[derive(Clone, Debug, Default)]
pub struct Lightest {
    /// Those with all states on devices, one for every ZeRO level.
    pub on_device: Vec<Decisions>,
    /// Those with states in host memory, one per ZeRO level and choice of states there. Within a
    /// level, those with less in host memory come first.
    pub on_host: Vec<Decisions>,
}

/// Bounds on time and memory over a pipeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PipelineFloors {
    /// Lower bounds of every strategy of the pipeline that fits.
    pub floors: Floors,
    /// The part of the bound on time that the update on hosts takes; 0 unless strategies fit only
    /// with states in host memory.
    pub on_host: Seconds,
    /// The messages that a strategy which fits may send; all of them if no memory limit is given.
    pub senders: Senders,
}

/// A set of a layout's data-parallel messages, one bit per index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Senders(u64);

impl Senders {
    /// All messages.
    pub const ALL: Self = Self(u64::MAX);

    /// Whether the set has the message with this index. It always has those from 64 on.
    #[must_use]
    pub fn has(self, index: usize) -> bool {
        index >= u64::BITS as usize || self.0 >> index & 1 == 1
    }

    pub(crate) fn without(self, index: usize) -> Self {
        match index < u64::BITS as usize {
            true => Self(self.0 & !(1 << index)),
            false => self,
        }
    }
}

/// Memory of the ranks of a pipeline, each at the moment when it holds most.
#[derive(Debug)]
pub(crate) struct Fullest {
    ranks: Vec<HeldBlocks>,
    /// Total bytes on the device: for each rank in turn, one number for every way to hold states in
    /// [`LayoutBounds::least`].
    on_device: Vec<Bytes>,
}

/// What a rank holds at its fullest moment, apart from states.
#[derive(Clone, Copy, Debug)]
struct HeldBlocks {
    weights: Weights,
    largest: Largest,
    /// Bytes of saved activations, and of what the running pass computes.
    passes: Bytes,
    /// The pool in which the rank lies.
    pool: usize,
}

/// Least costs of every kind of block under a layout, and the ways to hold its states. With several
/// pools, the kinds of each pool follow those of the pool before, as in a [`Shape`].
#[derive(Clone, Debug)]
pub struct LayoutBounds {
    /// By kind of block, seconds of a forward pass on the device, and seconds that the host takes to launch it.
    forward: [Vec<f64>; 2],
    /// Seconds of backward in one pass on the device, and on the host; then those of [`Part::Input`] and [`Part::All`].
    backward: [Vec<f64>; 4],
    saved: Vec<f64>,
    /// Bytes that backward needs beyond what is kept.
    transient: Vec<f64>,
    weights: Vec<Weights>,
    /// Bytes of a stage's output for one micro-batch, if the stage keeps it until the backward pass; else 0.
    output: f64,
    /// Bytes of the buffer for one tensor that a stage receives from another, if stages have such buffers; else 0.
    buffer: f64,
    transfer: f64,
    /// Bytes that a rank hands to the next stage.
    pub(crate) handed: Bytes,
    /// How long an activation takes over the link between pools, if there is one.
    pub(crate) over_link: Option<Way>,
    step: Seconds,
    outside: Bytes,
    /// Elements of the tied embedding, which both ends of the model have; 0 if it is not tied.
    tied: u64,
    /// Ways to shard states that leave least on a rank, with none in host memory.
    least: Vec<(Decisions, Sharding)>,
    /// All ways to hold states in host memory; within a ZeRO level, those with less come first.
    on_host: Vec<(Decisions, Sharding)>,
}

impl LayoutBounds {
    /// Bounds from the costs of `blocks`, the blocks of `d`; fields of `d` that do not change them
    /// are not read. `lightest` is `d` with the ways to shard states that leave least on a rank.
    pub(crate) fn new(
        costs: &BlockCosts,
        d: &Decisions,
        blocks: &Blocks,
        lightest: &Lightest,
        orders: &[AxisOrder],
    ) -> Result<Self, CostError> {
        let scenario = costs.scenario();
        let of_kind = blocks.of_kind();
        let all = |value: &dyn Fn(&BlockCost) -> f64| -> Vec<f64> {
            let value = |block: &Option<&Arc<BlockCost>>| block.map_or(0.0, |block| value(block));
            of_kind.iter().map(value).collect()
        };
        let whole = |b: &BlockCost| (b.recompute + b.backward.whole).device().0;
        let input = |b: &BlockCost| (b.recompute + b.backward.input).device().0;
        let both = |b: &BlockCost| input(b) + b.backward.weight.device().0;
        let buffers = (scenario.runtime.rewrites).contains(&Rewrite::BufferMicroBatches);
        let of_sent = |held: bool| if held { blocks.output().as_f64() } else { 0.0 };
        let overheads = &scenario.runtime.overheads;
        let sharded = |ways: &[Decisions]| -> Vec<(Decisions, Sharding)> {
            let sharding = |d: &Decisions| DataParallel::new(d, &scenario.cluster).sharding;
            ways.iter()
                .map(|d| (fewest_buckets(d), sharding(d)))
                .collect()
        };
        let table = shared_tables::table(scenario, d);
        // A prediction module may share its table with another block; the bound leaves it out.
        let weights = |b: &Option<&Arc<BlockCost>>| {
            let mut weights = b.map_or(Weights::default(), |b| b.weights);
            if b.is_some_and(|b| b.key.class == BlockClass::Mtp) {
                weights.share(table);
            }
            weights
        };
        Ok(Self {
            forward: [all(&|b| b.forward.device().0), all(&|b| b.forward.host.0)],
            backward: [
                all(&whole),
                all(&|b| (b.recompute + b.backward.whole).host.0),
                all(&|b| input(b).min(whole(b))),
                all(&|b| both(b).min(whole(b))),
            ],
            saved: all(&|b| b.memory.saved_bytes.as_f64()),
            transient: all(&|b| b.memory.transient_backward.as_f64()),
            weights: of_kind.iter().map(weights).collect(),
            output: of_sent(passed_on::keeps_output(scenario, d)),
            buffer: of_sent(d.pp > 1 && buffers),
            transfer: costs.least_transfer(d, blocks.output(), orders)?.0,
            handed: blocks.output(),
            over_link: None,
            step: scenario.by_host(&overheads.step),
            outside: scenario.outside(),
            tied: tied(costs, d),
            least: sharded(&lightest.on_device),
            on_host: sharded(&lightest.on_host),
        })
    }

    /// Adds the blocks of one more pool.
    pub(crate) fn with_pool(mut self, other: Self) -> Self {
        let own = self.forward.iter_mut().chain(&mut self.backward);
        let others = other.forward.into_iter().chain(other.backward);
        for (own, other) in own.zip(others) {
            own.extend(other);
        }
        self.saved.extend(other.saved);
        self.transient.extend(other.transient);
        self.weights.extend(other.weights);
        self.transfer = self.transfer.min(other.transfer);
        self
    }

    /// Bounds that hold for either: for each block the smaller of both costs.
    pub(crate) fn or_least(mut self, other: &Self) -> Self {
        let own = self.forward.iter_mut().chain(&mut self.backward);
        let others = other.forward.iter().chain(&other.backward);
        let bytes = [
            (&mut self.saved, &other.saved),
            (&mut self.transient, &other.transient),
        ];
        for (own, other) in own.zip(others).chain(bytes) {
            for (own, other) in own.iter_mut().zip(other) {
                *own = own.min(*other);
            }
        }
        for (own, other) in self.weights.iter_mut().zip(&other.weights) {
            own.copies = own.copies.min(other.copies);
        }
        self.transfer = self.transfer.min(other.transfer);
        self
    }

    /// Lower bound on the fullest rank's memory with all states on devices, at one ZeRO `level` or
    /// any. `as_on_first` scales a pool's bytes to the memory of the first pool's GPUs.
    pub(crate) fn least_memory(
        &self,
        costs: &BlockCosts,
        fullest: &Fullest,
        as_on_first: impl Fn(usize, Bytes) -> Bytes,
        level: Option<Level>,
    ) -> Bytes {
        let of_rank = |bytes: &[Bytes]| {
            let ways = self.least.iter().zip(bytes);
            let ways = ways.filter(|(way, _)| is_at(way, level));
            ways.map(|(_, bytes)| *bytes).min()
        };
        let of_ranks = fullest.on_device.chunks(self.least.len().max(1));
        let of_ranks = fullest.ranks.iter().zip(of_ranks.map(of_rank));
        most(costs, of_ranks, as_on_first)
    }

    /// Lower bounds with some states in host memory: on memory, and on the time of the hosts'
    /// update. `None` if no way to do so fits; that is checked only if all hosts are `alike`.
    ///
    /// # Errors
    /// When the cluster's file does not describe the host.
    pub(crate) fn on_host(
        &self,
        costs: &BlockCosts,
        (shape, fullest): (&Shape, &Fullest),
        as_on_first: impl Fn(usize, Bytes) -> Bytes,
        alike: bool,
        level: Option<Level>,
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
        let ways = self.on_host.iter().filter(|way| is_at(way, level));
        let ways: Vec<_> = ways.filter(fits).collect();
        let mut time: Option<Seconds> = None;
        for (d, sharding) in &ways {
            let step = offload::step(scenario, d, d.offload, sharding, weights)?;
            let step = step.total();
            time = Some(time.map_or(step, |least| least.min(step)));
        }
        Ok(time.map(|time| {
            let ways = most_on_host(&ways, |way| &way.0).copied();
            let of_rank = |rank| (rank, self.memory(costs, rank, ways.clone()));
            (
                most(costs, fullest.ranks.iter().map(of_rank), as_on_first),
                time * ROUNDING,
            )
        }))
    }

    /// Lower bound on the step time, with these data-parallel `messages`; with none if `None`.
    pub(crate) fn least_time(&self, shape: &Shape, messages: Option<&Messages>) -> Seconds {
        let of_rank = |passes: &Passes| {
            let added = messages.map(|messages| self.added(shape, passes, messages));
            self.time(passes, added.unwrap_or_default())
        };
        let times = shape.times.iter().map(of_rank);
        // Some pass waits for the last activation on the link, so the step is at least as long.
        let over_link = self.over_link.as_ref();
        let on_link = over_link.map(|way| way.least(shape.crossings, shape.micro_batches));
        let on_link = on_link.unwrap_or_default();
        (Seconds(times.fold(on_link.0, f64::max)) + self.step) * ROUNDING
    }

    fn added(&self, shape: &Shape, passes: &Passes, messages: &Messages) -> Added {
        let kernels = Kernels {
            forward: &self.forward[0],
            backward: &self.backward[0],
        };
        messages.add(kernels, shape, &passes.own)
    }

    fn time(&self, passes: &Passes, added: Added) -> f64 {
        let [device, host] = &self.forward;
        let sent = passes.transfers * self.transfer;
        let forward = product(&passes.forward, device) + sent + added.forward;
        let time = match passes.part {
            Part::Whole => {
                let on_host = product(&passes.forward, host)
                    + product(&passes.backward, &self.backward[1])
                    + sent;
                let backward = product(&passes.backward, &self.backward[0]) + added.backward;
                on_host.max(forward + backward).max(added.whole)
            }
            Part::Input => forward + product(&passes.backward, &self.backward[2]),
            Part::All => forward + product(&passes.backward, &self.backward[3]),
        };
        time.max(added.step)
    }

    /// Each rank's memory at its fullest moment; empty if the layout has no way to hold states.
    pub(crate) fn fullest(&self, costs: &BlockCosts, shape: &Shape) -> Fullest {
        let ranks = match self.least.is_empty() && self.on_host.is_empty() {
            true => &[],
            false => &shape.memory[..],
        };
        let ranks: Vec<HeldBlocks> = ranks.iter().map(|held| self.held(held)).collect();
        let of_rank = |rank| {
            let ways = self.least.iter().map(std::iter::once);
            ways.filter_map(move |way| self.memory(costs, rank, way))
        };
        Fullest {
            on_device: ranks.iter().flat_map(of_rank).collect(),
            ranks,
        }
    }

    fn held(&self, held: &Held) -> HeldBlocks {
        let mut weights = Weights::default();
        let mut largest = Largest::default();
        // At the rank's fullest moment one of its stages begins to run backward, its last block first.
        let mut transient = f64::INFINITY;
        let blocks = self.weights.iter().zip(&self.transient).enumerate();
        for ((kind, (of_block, &of_backward)), &count) in blocks.zip(&held.own) {
            weights += *of_block * count;
            if count > 0 {
                largest = largest.or(Largest::of(*of_block, Blocks::is_end(kind)));
                transient = transient.min(of_backward);
            }
        }
        let passed_on = held.outputs * self.output + held.unused_buffers * self.buffer;
        let saved = product(&held.saved, &self.saved) + passed_on;
        let held_by_passes = saved
            + if transient.is_finite() {
                transient
            } else {
                0.0
            };
        weights.share(self.tied);
        largest.share(self.tied);
        HeldBlocks {
            weights,
            largest,
            passes: Bytes((held_by_passes * ROUNDING) as u64),
            pool: held.pool,
        }
    }

    /// Lower bound on a rank's memory under any of `ways` to hold states; `None` if there is none.
    fn memory<'w>(
        &self,
        costs: &BlockCosts,
        rank: &HeldBlocks,
        ways: impl Iterator<Item = &'w (Decisions, Sharding)>,
    ) -> Option<Bytes> {
        let HeldBlocks {
            weights,
            largest,
            passes,
            ..
        } = *rank;
        let of_sharding = |(d, sharding): &(Decisions, Sharding)| {
            let states = offload::states_on_device(costs.scenario(), d, sharding, weights);
            let late = states::late_gradients(&costs.scenario().runtime, d, &states);
            states.total() - late.free + in_flight(d, costs, largest, weights)
        };
        let least = ways.map(of_sharding).min()?;
        Some(passes + self.outside + least)
    }
}

/// These decisions, but with gradients reduced after backward, which takes fewer buckets.
fn fewest_buckets(d: &Decisions) -> Decisions {
    let mut least = d.clone();
    least.overlap.grad_reduce = false;
    least
}

/// The memory that the fullest of these ranks needs at least. Bytes of a rank in another pool are scaled to the memory of the first
/// pool's GPUs. A rank without a way to hold its states (`None`) needs more than any GPU has.
fn most<'a>(
    costs: &BlockCosts,
    ranks: impl Iterator<Item = (&'a HeldBlocks, Option<Bytes>)>,
    as_on_first: impl Fn(usize, Bytes) -> Bytes,
) -> Bytes {
    let of_rank = |(rank, bytes): (&HeldBlocks, Option<Bytes>)| {
        bytes.map(|bytes| as_on_first(rank.pool, costs.scenario().with_fragmentation(bytes)))
    };
    let all = ranks.map(|rank| of_rank(rank).unwrap_or(Bytes(u64::MAX)));
    all.max().unwrap_or(Bytes(u64::MAX))
}

fn is_at((d, _): &(Decisions, Sharding), level: Option<Level>) -> bool {
    level.is_none_or(|level| level == (d.zero, d.reshard_after_forward))
}

/// For each pair of ZeRO level and `reshard_after_forward`, the way that keeps most in host memory. `ways` must be sorted by that
/// pair, and within it by what lies in host memory, least first.
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

/// Elements of the tied embedding, which both ends of the model have; 0 if it is not tied.
fn tied(costs: &BlockCosts, d: &Decisions) -> u64 {
    match costs.scenario().model.tied_embeddings {
        true => shared_tables::table(costs.scenario(), d),
        false => 0,
    }
}

/// Lower bound on the fullest rank's memory from states alone: their average over the pipeline's
/// ranks, plus context and workspace. It needs no prices. Ways that overfill host memory are left
/// out, if ranks are `alike` in their hosts.
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
    let modules = scenario.model.mtp_layers * shared_tables::table(scenario, d);
    weights.share(tied(costs, d) + modules);
    let sharding = |d: &Decisions| DataParallel::new(d, &scenario.cluster).sharding;
    let fits = |way: &&Decisions| {
        !alike || !offload::overfills_host(scenario, way, &sharding(way), weights, d.pp)
    };
    let on_host: Vec<&Decisions> = lightest.on_host.iter().filter(fits).collect();
    let ways = lightest.on_device.iter();
    let ways = ways.chain(most_on_host(&on_host, |way| way).copied());
    let of_way =
        |d: &Decisions| offload::states_on_device(scenario, d, &sharding(d), weights).total();
    let least = ways.map(of_way).min();
    let outside = scenario.outside();
    Ok(least.map_or(Bytes(u64::MAX), |least| {
        scenario.with_fragmentation(Bytes(least.0 / d.pp) + outside)
    }))
}
