//! The entry point: a cost model for one scenario, which caches block costs and programs.

use std::sync::{Arc, OnceLock};

use catalog::calibration::Calibration;
use catalog::runtime::Rewrite;
use catalog::{Bytes, Cluster, Dispatcher, Fitted, Fp8Recipe, Overlap, Seconds, Workload};
use plans::grammar::overlap_name;
use plans::{Decisions, Strategy, Timeline};

use crate::assemble::Assembled;
use crate::block_cost::{BlockCost, BlockKey};
use crate::blocks::BlockCosts;
use crate::engine::{Inputs, Outcome, Record, Waits, simulate, simulate_short};
use crate::held::{Counted, Held, Member};
use crate::imbalance::{self, Largest};
use crate::memo::Memo;
use crate::pipeline::Pipelines;
use crate::pools::PoolCosts;
use crate::reshard::{Lost, Placed, Resharding, Staged, resharding};
use crate::sequence::Sequence;
use crate::shape::{Shape, ShapeKey};
use crate::traffic::DataParallel;
use crate::{CostError, Scenario, book, messages, quantities, shared_cores, stragglers};

/// Predicts time and memory of strategies of one scenario. Can be shared between threads; caches block costs by local shape and programs
/// by schedule.
#[derive(Debug)]
pub struct CostModel {
    pub(crate) scenario: Scenario,
    pub(crate) pools: PoolCosts,
    pub(crate) pipelines: Pipelines,
    /// How often each rank of a pipeline runs each block, and how many it holds at once, by schedule and stages.
    pub(crate) shapes: Memo<ShapeKey, Shape>,
    /// Expected largest of several normal variables, by their number.
    pub(crate) largest: Largest,
    /// For every calibration of the cluster, the same under other factors; made when they are first asked for.
    pub(crate) others: OnceLock<Vec<Others>>,
}

/// Cost models of one scenario under other factors than those that a calibration learned.
#[derive(Debug)]
pub(crate) struct Others {
    /// The calibration.
    pub(crate) learned: Calibration,
    /// For every kind of work, in the order of `Rate::ALL`, with its factor alone grown a little.
    pub(crate) grown: Vec<CostModel>,
    /// With factors that explain the measured runs as well.
    pub(crate) alternatives: Vec<CostModel>,
}

/// Step time and peak memory of a simulated strategy, without a breakdown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Time of one step.
    pub step_time: Seconds,
    /// Largest peak memory of any pipeline rank. On a cluster of several pools a rank's peak counts as the same share of
    /// the memory of the first pool's GPUs.
    pub peak_memory: Bytes,
    /// Whether the peak is within device memory less headroom.
    pub fits: bool,
    /// Whether the states and activations that are kept in host memory fit there.
    pub fits_host: bool,
}

impl CostModel {
    /// A cost model for a scenario.
    ///
    /// # Errors
    /// When the device has no prices for the workload's precision.
    pub fn new(scenario: Scenario) -> Result<Self, CostError> {
        Self::with_constants(scenario, &Fitted::default())
    }

    /// A cost model for a scenario, with the given values of the fitted constants instead of the shipped ones.
    ///
    /// # Errors
    /// When the device has no prices for the workload's precision.
    pub fn with_constants(scenario: Scenario, fitted: &Fitted) -> Result<Self, CostError> {
        let scenario = scenario.with_alike_pools_as_one();
        let pools = PoolCosts::new(&scenario, |scenario| priced(scenario, fitted))?;
        Ok(Self::of_pools(scenario, pools))
    }

    /// The cost model of a scenario whose pools are priced.
    pub(crate) fn of_pools(scenario: Scenario, pools: PoolCosts) -> Self {
        Self {
            // Pricing adapts the model and the runtime.
            scenario: Scenario {
                cluster: scenario.cluster,
                ..pools.first().scenario().clone()
            },
            pools,
            pipelines: Pipelines::default(),
            shapes: Memo::default(),
            largest: Largest::default(),
            others: OnceLock::new(),
        }
    }

    /// The block costs of each pool.
    pub(crate) fn pools(&self) -> &[BlockCosts] {
        self.pools.all()
    }

    /// The scenario that it prices.
    #[must_use]
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Bytes of device memory that a strategy may use.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.scenario().capacity()
    }

    /// A cost model for another workload. It shares the costs of blocks that do not depend on that.
    ///
    /// # Errors
    /// When a number of the scenario is unusable, or the device has no prices for the precision.
    pub fn with_workload(&self, workload: Workload) -> Result<Self, CostError> {
        let scenario = Scenario {
            workload,
            ..self.scenario().clone()
        };
        quantities::check(&scenario)?;
        match self.pools.with_workload_of(&scenario) {
            Some(pools) => Ok(Self::of_pools(scenario, pools)),
            None => Self::new(scenario),
        }
    }

    /// Simulates a strategy for time and memory only.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn score(&self, strategy: &Strategy) -> Result<Score, CostError> {
        let assembled = self.assembled(strategy)?;
        self.score_of(strategy, &assembled)
    }

    /// Simulates an assembled strategy for time and memory only.
    pub(crate) fn score_of(
        &self,
        strategy: &Strategy,
        assembled: &Assembled,
    ) -> Result<Score, CostError> {
        let outcome = self.simulated(strategy, assembled)?;
        let peaks = outcome.ranks.iter();
        let peaks = peaks.map(|rank| self.scenario.with_fragmentation(rank.peak));
        let peak_memory = self.pools.fullest(&self.scenario, strategy, peaks)?;
        Ok(Score {
            step_time: outcome.step_time,
            peak_memory,
            fits: peak_memory <= self.capacity(),
            fits_host: self.fits_host(strategy, assembled)?,
        })
    }

    /// Whether what an assembled strategy keeps in host memory fits there.
    pub(crate) fn fits_host(
        &self,
        strategy: &Strategy,
        assembled: &Assembled,
    ) -> Result<bool, CostError> {
        let ranks = &assembled.ranks;
        if ranks.iter().all(|rank| rank.on_host.0 == 0) {
            return Ok(true);
        }
        let pools = self.pools.of_ranks(&self.scenario, strategy)?;
        Ok(self.pools.host_memory(&pools, ranks).fits())
    }

    /// Refuses tensor-parallel overlap beyond the runtime's own if GPUs lack peer access.
    pub(crate) fn reaches_peers(&self, d: &Decisions) -> Result<(), CostError> {
        let (cluster, runtime) = (&self.scenario().cluster, &self.scenario().runtime);
        let switched = d.overlap.tensor_parallel && !runtime.overlap.tensor_parallel && d.tp > 1;
        match switched && !cluster.reaches_peers() {
            false => Ok(()),
            true => Err(CostError::NoPeers {
                cluster: cluster.name.clone(),
                has: overlap_name(Overlap {
                    tensor_parallel: false,
                    ..d.overlap
                }),
            }),
        }
    }

    /// Refuses a dispatcher of tokens to experts that does not run on the cluster.
    pub(crate) fn has_dispatcher(&self, d: &Decisions) -> Result<(), CostError> {
        let cluster = &self.scenario().cluster;
        let across = d.experts_lie_across(cluster);
        let asked = d.dispatcher.filter(|_| d.ep > 1);
        match asked.filter(|asked| !asked.exists_on(cluster, across)) {
            None => Ok(()),
            Some(asked) => {
                let has = self.scenario().runtime.dispatchers_on(cluster, across);
                let has: Vec<&str> = has.into_iter().map(Dispatcher::name).collect();
                Err(CostError::NoDispatcher {
                    dispatcher: asked.name(),
                    cluster: cluster.name.clone(),
                    has: has.join(", "),
                })
            }
        }
    }

    /// Refuses an FP8 recipe that some GPU of the cluster does not have.
    pub(crate) fn has_recipe(&self, d: &Decisions) -> Result<(), CostError> {
        let (cluster, runtime) = (&self.scenario().cluster, &self.scenario().runtime);
        match d.fp8_recipe.filter(|recipe| !recipe.exists_on(cluster)) {
            None => Ok(()),
            Some(recipe) => {
                let has = runtime.fp8_recipes_on(cluster);
                let has: Vec<&str> = has.into_iter().map(Fp8Recipe::name).collect();
                Err(CostError::NoRecipe {
                    recipe: recipe.name(),
                    cluster: cluster.name.clone(),
                    has: has.join(", "),
                })
            }
        }
    }

    /// Simulates a strategy and records every event of the step.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn timeline(&self, strategy: &Strategy) -> Result<Timeline, CostError> {
        let mut timeline = Timeline {
            ranks: strategy.pp as u32,
            ..Timeline::default()
        };
        let assembled = self.assembled(strategy)?;
        self.recorded(strategy, &assembled, &mut timeline)?;
        timeline.events.sort_by(|a, b| {
            let (before, after) = ((a.rank, a.stream), (b.rank, b.stream));
            before.cmp(&after).then(a.start.0.total_cmp(&b.start.0))
        });
        Ok(timeline)
    }

    /// How a job goes on from `old` to `new`, each one strategy or one per group of replicas, with
    /// any numbers of devices. `lost` says what was lost, for each pool.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn resharding(
        &self,
        old: &[Placed<'_>],
        new: &[Placed<'_>],
        lost: &[Lost],
    ) -> Result<Resharding, CostError> {
        let (old, new) = (self.staged(old)?, self.staged(new)?);
        resharding(self.scenario(), &old, &new, lost)
    }

    /// Strategies with the pipeline ranks of their stages.
    fn staged<'a>(&self, of: &'a [Placed<'a>]) -> Result<Vec<Staged<'a>>, CostError> {
        let mut staged = Vec::with_capacity(of.len());
        for placed in of {
            let pipeline = self.pipelines.pipeline(placed.decisions)?;
            staged.push(Staged { placed, pipeline });
        }
        Ok(staged)
    }

    /// Memory of every pipeline rank of our own executor. Of the ranks that share a pipeline rank's
    /// stages, this is the one that holds most, if every expert receives equally many rows.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn held(&self, strategy: &Strategy) -> Result<Vec<Held>, CostError> {
        let members = (0..strategy.pp).map(|pp| Member {
            pp,
            ..Member::default()
        });
        members
            .map(|member| self.held_by(strategy, &member))
            .collect()
    }

    /// Memory that one rank of our own executor holds.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn held_by(&self, strategy: &Strategy, member: &Member) -> Result<Held, CostError> {
        let counted = Counted {
            scenario: self.scenario(),
            strategy,
            rank_of_stage: &self.pipelines.pipeline(strategy)?.rank_of_stage,
            program: &Pipelines::program(strategy)?,
            member,
        };
        counted.held()
    }

    pub(crate) fn simulated(
        &self,
        strategy: &Strategy,
        assembled: &Assembled,
    ) -> Result<Outcome, CostError> {
        if self.scenario().shares_cores() {
            return self.recorded(strategy, assembled, &mut ());
        }
        let mut outcome = self.outcome(strategy, assembled)?;
        outcome.wait(self.waits(strategy, assembled)?);
        finite(outcome)
    }

    /// Time that a step waits for unequal sequences and slow ranks, which are not simulated.
    pub(crate) fn waits(
        &self,
        strategy: &Strategy,
        assembled: &Assembled,
    ) -> Result<Waits, CostError> {
        let jitter = self.pools.jitter(&self.scenario, strategy)?;
        Ok(Waits {
            imbalance: imbalance::waiting(strategy, assembled, &self.largest),
            stragglers: match jitter {
                None => Seconds(0.0),
                Some(of_rank) => {
                    stragglers::waiting(strategy, assembled, |rank| of_rank[rank], &self.largest)
                }
            },
        })
    }

    /// Simulates a step; if groups of micro-batches repeat each other, only some of them.
    pub(crate) fn outcome(
        &self,
        d: &Decisions,
        assembled: &Assembled,
    ) -> Result<Outcome, CostError> {
        let apart = assembled.has_messages_apart();
        let mut attempt = 0;
        loop {
            let steps = self.pipelines.steps(d, apart, attempt)?;
            let inputs = self.inputs(d, &steps.sequence, assembled);
            let outcome = match steps.skipped {
                None => Some(simulate(&inputs, &mut ())),
                Some(skipped) => simulate_short(&inputs, skipped),
            };
            if let Some(outcome) = outcome {
                return Ok(outcome);
            }
            attempt += 1;
        }
    }

    /// Simulates a whole step and passes its events to `record`.
    fn recorded(
        &self,
        strategy: &Strategy,
        assembled: &Assembled,
        record: &mut impl Record,
    ) -> Result<Outcome, CostError> {
        let apart = assembled.has_messages_apart();
        let sequence = self.pipelines.sequence(strategy, apart)?;
        let inputs = self.inputs(strategy, &sequence, assembled);
        let Some(cores) = self.scenario().cores() else {
            return finite(simulate(&inputs, record));
        };
        let mut alone = Timeline::default();
        let mut outcome = simulate(&inputs, &mut alone);
        let peers = self.scenario().workload.gpus / strategy.pp;
        shared_cores::stretch(&alone, &mut outcome, peers, cores, record);
        finite(outcome)
    }

    /// The cost of a block on the first pool; each local shape is priced only once.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        self.pools.first().block(key)
    }

    pub(crate) fn assembled(&self, strategy: &Strategy) -> Result<Assembled, CostError> {
        let pipeline = self.pipelines.pipeline(strategy)?;
        if strategy.schedule.splits_backward() && !self.scenario.splits_backward() {
            return Err(CostError::WholeBackward {
                runtime: self.scenario.runtime.name.clone(),
                schedule: strategy.schedule.name(),
            });
        }
        let parallel = |cluster: &Cluster| DataParallel::new(strategy, cluster);
        (self.pools).assembled(&self.scenario, strategy, parallel, &pipeline)
    }

    fn inputs<'a>(
        &self,
        d: &Decisions,
        sequence: &'a Sequence,
        assembled: &'a Assembled,
    ) -> Inputs<'a> {
        let runtime = &self.scenario().runtime;
        Inputs {
            sequence,
            of: assembled,
            transfer_overlaps: messages::overlap_passes(self.scenario(), d),
            both_directions: !runtime.space.one_message_at_a_time,
            step_overhead: self.scenario().by_host(&runtime.overheads.step),
        }
    }
}

/// The block costs of a scenario on nodes that are all alike.
pub(crate) fn priced(mut scenario: Scenario, fitted: &Fitted) -> Result<BlockCosts, CostError> {
    quantities::check(&scenario)?;
    let fuses = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
    if fuses(Rewrite::FuseProjections) {
        scenario.model = scenario.model.with_fused_projections();
    } else if fuses(Rewrite::FuseQkv) {
        scenario.model = scenario.model.with_fused_qkv();
    }
    // torchtitan's loss for multi-token prediction runs over all tokens at once (`models/deepseek_v3/mtp.py`, `MTPLoss`).
    if scenario.model.mtp_layers > 0 {
        scenario.runtime.rewrites.remove(&Rewrite::ChunkLoss);
    }
    let cluster = &scenario.cluster;
    let attention = &mut scenario.runtime.attention;
    *attention = attention.on(cluster.device.architecture);
    if let Some(profile) = &cluster.profile {
        if scenario.workload.documents_apart().is_some() {
            return Err(CostError::AcrossDocuments);
        }
        let gpus = profile.machine.gpu.is_some();
        scenario.runtime = book::adapted(scenario.runtime, gpus)?;
    }
    // Products of rows that are all alike switch fewer transistors and need less power, so power does not limit clocks further than
    // in benchmarks (Gregersen et al., Input-Dependent Power Usage in GPUs, arXiv 2409.18324).
    let of_benchmarks = Fitted::of_benchmarks();
    let fitted = match scenario.workload.has_alike_tokens() {
        true => &of_benchmarks,
        false => fitted,
    };
    let book = book::open(cluster, scenario.workload.gpus, fitted)?;
    quantities::check_precision(cluster, scenario.workload.precision)?;
    Ok(BlockCosts::new(scenario, book))
}

/// Refuses an outcome whose step time is not finite.
pub(crate) fn finite(outcome: Outcome) -> Result<Outcome, CostError> {
    if outcome.step_time.0.is_finite() {
        Ok(outcome)
    } else {
        Err(CostError::Endless)
    }
}

#[cfg(test)]
mod tests {
    use catalog::{Precision, ScheduleKind, WorkloadSizes};

    use super::*;
    use crate::testing;

    /// A cost model for a model with more layers than 32 pipeline ranks have stages.
    fn costs() -> CostModel {
        let config = r#"{"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 259,
            "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096}"#;
        CostModel::new(Scenario {
            model: catalog::hf::decode(config, "test", "llama").expect("a model"),
            cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
            runtime: catalog::load::runtime("vescale").expect("a preset"),
            workload: workload(2, 2),
            headroom: 0.0,
        })
        .expect("priced")
    }

    fn workload(gpus: u64, global_batch: u64) -> Workload {
        let sizes = WorkloadSizes {
            gpus,
            seq_len: 512,
            global_batch,
            precision: Precision::Bf16,
        };
        Workload::new(sizes).expect("a workload")
    }

    #[test]
    fn messages_slow_the_kernels_of_each_pool_as_its_devices_do() {
        let cluster = catalog::load::cluster("8 x dgx-a100 + 8 x dgx-h100").expect("a cluster");
        let costs = CostModel::new(Scenario {
            cluster,
            workload: workload(16, 16),
            ..costs().scenario().clone()
        });
        let costs = costs.expect("priced");
        let scenario = costs.scenario();
        let strategy = testing::strategy(scenario, "pp2 dp8 zero1 mbs1 1f1b");
        let assembled = costs.assembled(&strategy);
        let assembled = assembled.expect("assembled");
        let own = costs.pools().iter().map(BlockCosts::scenario);
        let own: Vec<f64> = own.map(Scenario::slowdown_beside_nccl).collect();
        let slowdowns: Vec<f64> = assembled.ranks.iter().map(|rank| rank.slowdown).collect();
        assert_eq!(slowdowns, own);
        assert!(own[0] > own[1], "{own:?}");
    }

    #[test]
    fn what_repeats_itself_need_not_be_simulated() {
        let costs = costs();
        let mut short = 0;
        let mut compared = 0;
        for pp in 2..=32 {
            for (kind, vpp) in ScheduleKind::ALL
                .into_iter()
                .flat_map(|kind| (1..=8).map(move |vpp| (kind, vpp)))
            {
                for micro_batches in [512 / pp * pp, 500 - 3 * pp, 256 / pp * pp + pp] {
                    if plans::schedule::build(kind, pp, vpp, micro_batches).is_err() {
                        continue;
                    }
                    let costs = costs
                        .with_workload(workload(2 * pp, 2 * micro_batches))
                        .expect("priced");
                    let zero = ["zero0", "zero1", "zero2", "zero3", "zero3 reshard=off"];
                    let zero = zero[compared % zero.len()];
                    let text = format!("pp{pp} vpp{vpp} dp2 {zero} mbs1 {}", kind.name());
                    let strategy = testing::strategy(costs.scenario(), &text);
                    let assembled = costs.assembled(&strategy).expect("assembled");
                    let whole = costs.recorded(&strategy, &assembled, &mut ());
                    let fast = costs.simulated(&strategy, &assembled);
                    let [whole, fast] = [whole, fast].map(|of| of.expect("simulated"));
                    assert_eq!(whole, fast, "{text} with {micro_batches} micro-batches");
                    let steps = costs
                        .pipelines
                        .steps(&strategy, assembled.has_messages_apart(), 0)
                        .expect("a schedule");
                    short += usize::from(steps.skipped.is_some());
                    compared += 1;
                }
            }
        }
        assert!(short * 2 > compared, "{short} of {compared}");
    }
}
