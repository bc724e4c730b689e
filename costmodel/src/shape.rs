//! Counts of blocks: how often each rank of a pipeline runs every kind of block, and how many it holds. They depend on the
//! schedule and its stages, not on what blocks cost. A rank is left out if another has at least as many of every kind.

use plans::{Decisions, StagePartition};

use crate::blocks::BlockCosts;
use crate::crossings::Crossings;
use crate::pipeline::{Pipeline, ScheduleKey, schedule_key};

/// Number of kinds of blocks before layers: embedding, head, prediction module. Then every class of
/// layers has two kinds: the others, and those that `of_first_and_others` calls first.
const ENDS: usize = 3;
const EMBEDDING: usize = 0;
const HEAD: usize = 1;
const MTP: usize = 2;

/// How often the ranks of a pipeline run and hold each kind of block in a step. On a cluster of several pools a kind of
/// block on one pool is a kind of its own: the kinds of the first pool, then those of the second, and so on.
#[derive(Clone, Debug)]
pub struct Shape {
    /// How often each rank runs each kind of block; dominated ranks are left out.
    pub(crate) times: Vec<Passes>,
    /// What each rank holds at its fullest moment; dominated ranks are left out.
    pub(crate) memory: Vec<Held>,
    /// The blocks of the first stage in order: the kind and the number of each row of equal blocks.
    pub(crate) first_stage: Vec<(usize, f64)>,
    pub(crate) micro_batches: f64,
    /// Numbers of transfers between pools.
    pub(crate) crossings: Crossings,
    /// The least number of blocks of every kind that any rank has.
    pub(crate) least: Vec<u64>,
}

/// What decides a shape: of recomputation only how many layers of a stage differ from the rest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ShapeKey {
    schedule: ScheduleKey,
    stages: StagePartition,
    /// For every virtual stage, how many of its layers recompute what its first layer does.
    as_first: Vec<u64>,
    offload_layers: u64,
}

impl ShapeKey {
    pub(crate) fn of(d: &Decisions) -> Self {
        let stages = 0..d.stages.0.len();
        Self {
            schedule: schedule_key(d),
            stages: d.stages.clone(),
            as_first: stages.map(|stage| d.layers_as_first(stage)).collect(),
            offload_layers: d.offload_layers,
        }
    }
}

/// A lower bound on the time of a step, as the numbers of blocks run and of transfers.
#[derive(Clone, Debug)]
pub(crate) struct Passes {
    pub(crate) forward: Vec<f64>,
    pub(crate) backward: Vec<f64>,
    pub(crate) transfers: f64,
    pub(crate) part: Part,
    pub(crate) own: Own,
}

/// What a rank runs for one micro-batch.
#[derive(Clone, Debug)]
pub(crate) struct Own {
    /// Number of its blocks of every kind.
    pub(crate) blocks: Vec<f64>,
    /// For every kind, how often a block comes right after another of this kind in a stage.
    pub(crate) repeats: Vec<f64>,
    /// Whether the rank has the first stage.
    pub(crate) is_first: bool,
}

/// The part of backward that [`Passes::backward`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Backward in one pass.
    Whole,
    /// The half that computes gradients of inputs.
    Input,
    /// Both halves, or one pass, whichever is shorter.
    All,
}

/// What a rank holds at its fullest moment.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) saved: Vec<f64>,
    pub(crate) own: Vec<u64>,
    /// Number of outputs, for later stages, of the passes in flight.
    pub(crate) outputs: f64,
    /// Number of tensors that its stages receive in a step, less the inputs of the passes in flight.
    pub(crate) unused_buffers: f64,
    /// The pool in which the rank lies.
    pub(crate) pool: usize,
}

impl Shape {
    /// The counts of a pipeline; `pool_of_rank` is the pool of each rank, of `pools` pools. Of `d`
    /// only schedule, stages, micro-batches, and recomputed and offloaded layers are read.
    pub(crate) fn new(
        costs: &BlockCosts,
        d: &Decisions,
        pipeline: &Pipeline,
        pool_of_rank: &[usize],
        pools: usize,
    ) -> Self {
        let owners = &pipeline.rank_of_stage;
        let kinds = ENDS + 2 * costs.layer_classes.len();
        let placed = |rows: &[Vec<(usize, u64)>]| {
            let pool_of_stage = owners.iter().map(|&rank| pool_of_rank[rank as usize]);
            let stages = rows.iter().map(|rows| counts(rows, kinds));
            of_pools(stages.collect(), pool_of_stage, pools)
        };
        let mut rows = rows_of_stages(costs, d, 0);
        let stages = placed(&rows);
        if pools > 1 {
            // With several pools there is no bound on messages, so rows are not needed.
            rows.clear();
        }
        let kept = match d.offload_layers {
            0 => None,
            on_host => Some(placed(&rows_of_stages(costs, d, on_host))),
        };
        let kept = kept.as_ref().unwrap_or(&stages);
        let kinds = kinds * pools;
        let ranks = d.pp as usize;
        let (own, paths) = paths(&stages, owners, ranks, kinds);
        let least = |kind: usize| own.iter().map(|own| own[kind]).min().unwrap_or_default();
        let mut shape = Self {
            times: Vec::new(),
            memory: Vec::new(),
            first_stage: (rows.iter().take(1).flatten())
                .map(|&(kind, count)| (kind, count as f64))
                .collect(),
            micro_batches: d.num_micro_batches as f64,
            crossings: Crossings::new(owners, pool_of_rank),
            least: (0..kinds).map(least).collect(),
        };
        let repeats = repeats_of_ranks(&rows, owners, ranks, kinds);
        for (rank, repeats) in repeats.into_iter().enumerate() {
            let path = paths[rank].clone().unwrap_or_default();
            let mut busy = vec![0u64; kinds];
            add(&mut busy, &own[rank], d.num_micro_batches);
            let of_rank = Own {
                blocks: floats(&own[rank]),
                repeats,
                is_first: owners[0] as usize == rank,
            };
            shape.add_times(of_rank, busy, path, d.schedule.splits_backward());
            let in_flight = &pipeline.in_flight[rank];
            let pool = pool_of_rank[rank];
            let received = pipeline.received(rank) * d.num_micro_batches;
            let own = own[rank].clone();
            shape.add_memory(Held::new(in_flight, kept, own, received, pool));
        }
        shape
    }

    /// Adds a rank that runs `busy` blocks, after a path of blocks and transfers on earlier ranks.
    fn add_times(
        &mut self,
        own: Own,
        busy: Vec<u64>,
        (before, crossings): (Vec<u64>, u64),
        split: bool,
    ) {
        let alone = floats(&busy);
        let mut whole = busy;
        add(&mut whole, &before, 1);
        let whole = floats(&whole);
        self.add_time(Passes {
            forward: whole.clone(),
            backward: whole.clone(),
            transfers: 2.0 * crossings as f64,
            part: if split { Part::Input } else { Part::Whole },
            own: own.clone(),
        });
        if split {
            self.add_time(Passes {
                forward: whole,
                backward: alone,
                transfers: crossings as f64,
                part: Part::All,
                own,
            });
        }
    }

    fn add_time(&mut self, new: Passes) {
        let outweighs = |a: &Passes, b: &Passes| {
            a.part == b.part
                && a.transfers >= b.transfers
                && a.own.is_first == b.own.is_first
                && at_least(&a.forward, &b.forward)
                && at_least(&a.backward, &b.backward)
                && at_least(&a.own.blocks, &b.own.blocks)
                && at_least(&a.own.repeats, &b.own.repeats)
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
                && a.unused_buffers >= b.unused_buffers
                && at_least(&a.saved, &b.saved)
                && at_least(&a.own, &b.own)
        };
        if !self.memory.iter().any(|known| outweighs(known, &new)) {
            self.memory.retain(|known| !outweighs(&new, known));
            self.memory.push(new);
        }
    }
}

impl Held {
    /// What a rank holds: `in_flight` pairs a stage with its passes, which keep `kept[stage]` each.
    /// Its stages receive `received` tensors in a step.
    fn new(
        in_flight: &[(u32, u32)],
        kept: &[Vec<u64>],
        own: Vec<u64>,
        received: u64,
        pool: usize,
    ) -> Self {
        let mut saved = vec![0u64; own.len()];
        let mut outputs = 0;
        let mut inputs = 0;
        for &(stage, count) in in_flight {
            add(&mut saved, &kept[stage as usize], u64::from(count));
            // The last stage hands nothing on.
            if stage as usize + 1 < kept.len() {
                outputs += count;
            }
            if stage > 0 {
                inputs += u64::from(count);
            }
        }
        Self {
            saved: floats(&saved),
            own,
            outputs: f64::from(outputs),
            unused_buffers: received.saturating_sub(inputs) as f64,
            pool,
        }
    }
}

/// For every rank and kind, how often a block follows one of its kind in a stage.
fn repeats_of_ranks(
    rows: &[Vec<(usize, u64)>],
    owners: &[u32],
    ranks: usize,
    kinds: usize,
) -> Vec<Vec<f64>> {
    let mut repeats = vec![vec![0.0; kinds]; ranks];
    for (rows, &owner) in rows.iter().zip(owners) {
        for &(kind, count) in rows {
            repeats[owner as usize][kind] += (count - 1) as f64;
        }
    }
    repeats
}

/// For every virtual stage, its rows of equal blocks in order, by kind and number; the first
/// `without` layers of each stage are left out.
fn rows_of_stages(costs: &BlockCosts, d: &Decisions, without: u64) -> Vec<Vec<(usize, u64)>> {
    let last = d.stages.0.len() - 1;
    let mut first_layer = 0;
    let mut stages = Vec::with_capacity(d.stages.0.len());
    for (index, &count) in d.stages.0.iter().enumerate() {
        let mut rows: Vec<(usize, u64)> = Vec::with_capacity(4);
        let mut add = |kind: usize, count: u64| match rows.last_mut() {
            Some((row, counted)) if *row == kind => *counted += count,
            _ if count == 0 => {}
            _ => rows.push((kind, count)),
        };
        if index == 0 {
            add(EMBEDDING, 1);
        }
        let end = first_layer + count as usize;
        let layers = (0u64..).zip(&costs.class_of_layer[first_layer..end]);
        let first = d.layers_as_first(index);
        for (offset, &class) in layers.skip(without as usize) {
            let as_first = offset < first;
            add(ENDS + 2 * usize::from(class) + usize::from(as_first), 1);
        }
        if index == last {
            add(MTP, costs.scenario().model.mtp_layers);
            add(HEAD, 1);
        }
        first_layer = end;
        stages.push(rows);
    }
    stages
}

/// The number of blocks of each kind in these rows.
fn counts(rows: &[(usize, u64)], kinds: usize) -> Vec<u64> {
    let mut counts = vec![0; kinds];
    for &(kind, count) in rows {
        counts[kind] += count;
    }
    counts
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

/// The blocks of every rank, and for each rank the blocks and transfers before its first stage.
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
