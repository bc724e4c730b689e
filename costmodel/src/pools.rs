//! Costs on the pools of a cluster: blocks are priced on each of them, and a strategy is assembled from those of the pool
//! in which each pipeline rank lies.

use std::sync::Arc;

use catalog::{Bytes, Cluster, Offload, Seconds};
use plans::{Axis, Decisions, HostMemory};

use crate::assemble::{Assembled, assemble};
use crate::blocks::BlockCosts;
use crate::crossings::{Crossings, Way};
use crate::of_rank::OfRank;
use crate::pipeline::Pipeline;
use crate::states::Weights;
use crate::traffic::DataParallel;
use crate::{CostError, Scenario, offload};

/// The time and memory of a model's blocks on each pool of the cluster. A cluster whose nodes are all alike is one pool.
#[derive(Debug)]
pub(crate) struct PoolCosts {
    /// One entry for each pool, in the order in which the cluster lists its pools.
    parts: Vec<BlockCosts>,
}

/// A pool of the cluster, with the strategy assembled from its block costs.
struct Holder {
    /// The strategy's costs if all pipeline ranks ran in this pool.
    assembled: Assembled,
    /// Where this pool's classes of stages begin in the list of the classes of all pools.
    first_class: u32,
}

impl PoolCosts {
    /// The costs of a scenario; `priced` prices the blocks of one whose cluster has nodes that are all alike.
    ///
    /// # Errors
    /// When a pool has no prices.
    pub(crate) fn new(
        scenario: &Scenario,
        priced: impl Fn(Scenario) -> Result<BlockCosts, CostError>,
    ) -> Result<Self, CostError> {
        let Some(pools) = &scenario.cluster.pools else {
            let parts = vec![priced(scenario.clone())?];
            return Ok(Self { parts });
        };
        let on = |cluster: &Cluster| {
            priced(Scenario {
                cluster: cluster.clone(),
                ..scenario.clone()
            })
        };
        let parts = pools.parts.iter().map(|pool| on(&pool.cluster));
        Ok(Self {
            parts: parts.collect::<Result<_, _>>()?,
        })
    }

    /// The costs for another workload, with shared caches; `None` if prices depend on it.
    pub(crate) fn with_workload_of(&self, scenario: &Scenario) -> Option<Self> {
        let on = |costs: &BlockCosts| {
            costs.with_workload_of(&Scenario {
                cluster: costs.scenario().cluster.clone(),
                ..scenario.clone()
            })
        };
        let parts = self.parts.iter().map(on);
        Some(Self {
            parts: parts.collect::<Option<_>>()?,
        })
    }

    /// The costs of the first pool.
    pub(crate) fn first(&self) -> &BlockCosts {
        &self.parts[0]
    }

    /// The costs of every pool.
    pub(crate) fn all(&self) -> &[BlockCosts] {
        &self.parts
    }

    /// The pool in which each pipeline rank of a strategy lies.
    ///
    /// # Errors
    /// When a pipeline rank has GPUs of several pools.
    pub(crate) fn of_ranks(
        &self,
        whole: &Scenario,
        d: &Decisions,
    ) -> Result<Vec<usize>, CostError> {
        let Some(pools) = &whole.cluster.pools else {
            return Ok(vec![0; d.pp as usize]);
        };
        let outermost = d.axis_order.0.last() == Some(&Axis::Pp);
        let owners = pools.of_pipeline(d.pp).filter(|_| outermost);
        owners.ok_or_else(|| CostError::AcrossPools {
            ranks: d.pp,
            gpus: pools.parts.iter().map(|pool| pool.gpus).collect(),
        })
    }

    /// The jitter of every pipeline rank of a strategy; `None` if no pool has any.
    ///
    /// # Errors
    /// When a pipeline rank has GPUs of several pools.
    pub(crate) fn jitter(
        &self,
        whole: &Scenario,
        d: &Decisions,
    ) -> Result<Option<Vec<f64>>, CostError> {
        let of_pool = |of: &BlockCosts| of.scenario().jitter();
        if self.parts.iter().all(|of| of_pool(of) == 0.0) {
            return Ok(None);
        }
        let owners = self.of_ranks(whole, d)?.into_iter();
        Ok(Some(
            owners.map(|pool| of_pool(&self.parts[pool])).collect(),
        ))
    }

    /// Host memory that pipeline ranks take of a node, in the pool whose hosts they fill most.
    pub(crate) fn host_memory(&self, pool_of_rank: &[usize], ranks: &[OfRank]) -> HostMemory {
        let pools = self.parts.iter().map(BlockCosts::scenario);
        let on_host: Vec<Bytes> = ranks.iter().map(|rank| rank.on_host).collect();
        offload::on_fullest_host(pools, pool_of_rank, &on_host)
    }

    /// Scales bytes in a pool to the same share of the memory of the first pool's GPUs.
    pub(crate) fn as_on_first(&self, pool: usize, bytes: Bytes) -> Bytes {
        let [first, own] = [0, pool].map(|pool| self.parts[pool].scenario().capacity());
        bytes.as_share_of(first, own)
    }

    /// The fullest rank's bytes, scaled by [`Self::as_on_first`]; `ranks` are all ranks' bytes.
    ///
    /// # Errors
    /// When a pipeline rank has GPUs of several pools.
    pub(crate) fn fullest(
        &self,
        whole: &Scenario,
        d: &Decisions,
        ranks: impl Iterator<Item = Bytes>,
    ) -> Result<Bytes, CostError> {
        if whole.cluster.pools.is_none() {
            return Ok(ranks.max().unwrap_or_default());
        }
        let pools = self.of_ranks(whole, d)?;
        let shares = ranks
            .zip(pools)
            .map(|(bytes, pool)| self.as_on_first(pool, bytes));
        Ok(shares.max().unwrap_or_default())
    }

    /// The least result of [`Self::as_on_first`] for these bytes in any pool.
    pub(crate) fn at_least_on_first(&self, bytes: Bytes) -> Bytes {
        let shares = (0..self.parts.len()).map(|pool| self.as_on_first(pool, bytes));
        shares.min().unwrap_or(bytes)
    }

    /// For every pipeline rank of an assembled strategy, what its host would take in the optimizer step if these states
    /// lay in its memory.
    ///
    /// # Errors
    /// When the host of a pool is not known.
    pub(crate) fn on_hosts(
        &self,
        whole: &Scenario,
        d: &Decisions,
        offload: Offload,
        assembled: &Assembled,
    ) -> Result<Vec<Seconds>, CostError> {
        let pools = self.of_ranks(whole, d)?;
        let step = |(weights, pool): (Weights, usize)| {
            let scenario = self.parts[pool].scenario();
            let sharding = DataParallel::new(d, &scenario.cluster).sharding;
            let step = offload::step(scenario, d, Some(offload), &sharding, weights)?;
            Ok(step.total())
        };
        let weights = assembled.weights_of_ranks().into_iter();
        weights.zip(pools).map(step).collect()
    }

    /// Assembles a strategy: every pipeline rank with the costs of its pool.
    ///
    /// # Errors
    /// When a block cannot be traced, or a pipeline rank has GPUs of several pools.
    pub(crate) fn assembled(
        &self,
        whole: &Scenario,
        d: &Decisions,
        parallel: impl Fn(&Cluster) -> DataParallel,
        pipeline: &Arc<Pipeline>,
    ) -> Result<Assembled, CostError> {
        let on = |costs: &BlockCosts| {
            let parallel = parallel(&costs.scenario().cluster);
            assemble(costs, d, &parallel, pipeline)
        };
        let Some(pools) = &whole.cluster.pools else {
            return on(self.first());
        };
        let owners = self.of_ranks(whole, d)?;
        let mut holders = Vec::with_capacity(self.parts.len());
        let mut first_class = 0;
        for costs in &self.parts {
            let assembled = on(costs)?;
            let next = first_class + assembled.classes.len() as u32;
            holders.push(Holder {
                assembled,
                first_class,
            });
            first_class = next;
        }
        let mut joined = joined(&holders, &owners);
        let blocks = self.first().blocks_of(d)?;
        let link = pools.between.as_ref();
        let over_link = link.map(|link| Way::new(link, whole, d, blocks.output()));
        let crossing = over_link.map_or(Seconds(0.0), |way| way.transfer());
        for (stage, pair) in pipeline.rank_of_stage.windows(2).enumerate() {
            let [from, to] = [pair[0], pair[1]].map(|rank| owners[rank as usize]);
            let ends = [from, to].map(|pool| holders[pool].assembled.transfers[stage]);
            joined.transfers[stage] = match from == to {
                true => ends[0],
                false => ends[0].max(ends[1]).max(crossing),
            };
        }
        if let Some(way) = over_link {
            let crossings = Crossings::new(&pipeline.rank_of_stage, &owners);
            joined.on_link = way.least(crossings, d.num_micro_batches as f64);
        }
        Ok(joined)
    }
}

/// What every rank and stage costs in its own pool; transfers are those of the first pool.
fn joined(holders: &[Holder], owners: &[usize]) -> Assembled {
    let mut joined = holders[0].assembled.clone();
    joined.classes = holders
        .iter()
        .flat_map(|of| of.assembled.classes.iter().cloned())
        .collect();
    for (stage, class) in joined.class_of_stage.iter_mut().enumerate() {
        let of = &holders[owners[joined.pipeline.rank_of_stage[stage] as usize]];
        *class = of.first_class + of.assembled.class_of_stage[stage];
    }
    for (rank, &pool) in owners.iter().enumerate() {
        joined.ranks[rank] = holders[pool].assembled.ranks[rank];
    }
    joined
}
