//! The entry point: a cost model for one scenario, which caches block costs and programs.

use std::sync::Arc;

use catalog::runtime::Rewrite;
use catalog::{Bytes, Fitted, LayerClass, Seconds};
use plans::{Floors, Prediction, Strategy, Timeline};

use crate::assemble::{Assembled, assemble};
use crate::block_cost::{BlockCost, BlockKey};
use crate::blocks::BlockCosts;
use crate::engine::{Inputs, Outcome, Record, simulate};
use crate::held::{Counted, Held, Member};
use crate::pipeline::Pipelines;
use crate::recorder::Recorder;
use crate::shared_cores::Busy;
use crate::{CostError, Scenario, book, floors, predict, quantities};

/// Predicts time and memory of strategies of one scenario. Can be shared between threads; caches block costs by local shape and programs
/// by schedule.
#[derive(Debug)]
pub struct CostModel {
    blocks: BlockCosts,
    pipelines: Pipelines,
}

/// Step time and peak memory of a simulated strategy, without a breakdown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Time of one step.
    pub step_time: Seconds,
    /// Largest peak memory of any pipeline rank.
    pub peak_memory: Bytes,
    /// Whether the peak is within device memory less headroom.
    pub fits: bool,
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
    pub fn with_constants(mut scenario: Scenario, fitted: &Fitted) -> Result<Self, CostError> {
        quantities::check(&scenario)?;
        if scenario
            .runtime
            .rewrites
            .contains(&Rewrite::FuseProjections)
        {
            scenario.model = scenario.model.with_fused_projections();
        }
        if let Some(profile) = &scenario.cluster.profile {
            let gpus = profile.machine.gpu.is_some();
            scenario.runtime = book::adapted(scenario.runtime, gpus)?;
        }
        let book = book::open(&scenario.cluster, scenario.workload.gpus, fitted).map_err(|e| {
            CostError::Prices {
                device: scenario.cluster.device.name.clone(),
                reason: e.to_string(),
            }
        })?;
        let precision = scenario.workload.precision;
        if scenario
            .cluster
            .device
            .peak_rate(precision.matmul())
            .is_none()
        {
            let device = scenario.cluster.device.name.clone();
            return Err(CostError::NoPeak {
                device,
                precision: format!("{precision:?}").to_lowercase(),
            });
        }
        Ok(Self {
            blocks: BlockCosts::new(scenario, book),
            pipelines: Pipelines::default(),
        })
    }

    /// The scenario that it prices.
    #[must_use]
    pub fn scenario(&self) -> &Scenario {
        self.blocks.scenario()
    }

    /// The distinct decoder layers of the model.
    #[must_use]
    pub fn layer_classes(&self) -> &[LayerClass] {
        self.blocks.layer_classes()
    }

    /// Bytes of device memory that a strategy may use.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.scenario().capacity()
    }

    /// Lower bounds on time and memory, without simulation.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn floors(&self, strategy: &Strategy) -> Result<Floors, CostError> {
        let pipeline = self.pipelines.pipeline(strategy)?;
        let owners = Arc::clone(&pipeline.rank_of_stage);
        let assembled = assemble(&self.blocks, strategy, owners)?;
        Ok(floors::floors(
            self.scenario(),
            strategy,
            &assembled,
            &pipeline,
        ))
    }

    /// Simulates a strategy for time and memory only.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn score(&self, strategy: &Strategy) -> Result<Score, CostError> {
        let (_, outcome) = self.simulated(strategy, &mut ())?;
        let peak = outcome
            .ranks
            .iter()
            .map(|r| r.peak)
            .max()
            .unwrap_or_default();
        let peak_memory = self.scenario().with_fragmentation(peak);
        Ok(Score {
            step_time: outcome.step_time,
            peak_memory,
            fits: peak_memory <= self.capacity(),
        })
    }

    /// Simulates a strategy and says in detail where its time and memory go.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn predict(&self, strategy: &Strategy) -> Result<Prediction, CostError> {
        let (assembled, outcome) = self.simulated(strategy, &mut ())?;
        let program = self.pipelines.program(strategy)?;
        let used = self.blocks.book().provenance();
        Ok(predict::prediction(
            self.scenario(),
            used,
            strategy,
            &assembled,
            &outcome,
            &program,
        ))
    }

    /// Simulates a strategy and records every event of the step.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn timeline(&self, strategy: &Strategy) -> Result<Timeline, CostError> {
        let mut recorder = Recorder::new(strategy.pp as u32);
        self.simulated(strategy, &mut recorder)?;
        Ok(recorder.finish())
    }

    /// What every pipeline rank of our own executor holds. Several ranks share a pipeline rank's stages; this is the
    /// one that holds most, if every expert receives equally many rows.
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

    /// What one rank of our own executor holds.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn held_by(&self, strategy: &Strategy, member: &Member) -> Result<Held, CostError> {
        let counted = Counted {
            scenario: self.scenario(),
            strategy,
            rank_of_stage: &self.pipelines.pipeline(strategy)?.rank_of_stage,
            program: &*self.pipelines.program(strategy)?,
            member,
        };
        counted.held()
    }

    fn simulated(
        &self,
        strategy: &Strategy,
        record: &mut impl Record,
    ) -> Result<(Assembled, Outcome), CostError> {
        let program = self.pipelines.program(strategy)?;
        let assembled = self.assembled(strategy)?;
        let overheads = &self.scenario().runtime.overheads;
        let inputs = Inputs {
            ranks: &program.ranks,
            stages: &assembled.stages,
            transfer: assembled.transfer,
            transfer_overlaps: strategy.overlap.pipeline && !self.scenario().shares_cores(),
            micro_batches: strategy.num_micro_batches as u32,
            overlap_slowdown: overheads.overlap_slowdown.value,
            optimizer: &assembled.optimizer,
            resident: &assembled.resident,
            optimizer_transient: &assembled.optimizer_transient,
            step_overhead: self.scenario().by_host(&overheads.step),
        };
        let Some(cores) = self.scenario().cores() else {
            let outcome = finite(simulate(&inputs, record))?;
            return Ok((assembled, outcome));
        };
        let mut busy = Busy::default();
        let mut outcome = simulate(&inputs, &mut busy);
        let peers = self.scenario().workload.gpus / strategy.pp;
        busy.stretch(&mut outcome, peers, cores, record);
        Ok((assembled, finite(outcome)?))
    }

    /// The cost of a block; each local shape is priced only once.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        self.blocks.block(key)
    }

    fn assembled(&self, strategy: &Strategy) -> Result<Assembled, CostError> {
        let pipeline = self.pipelines.pipeline(strategy)?;
        assemble(&self.blocks, strategy, Arc::clone(&pipeline.rank_of_stage))
    }
}

/// Refuses an outcome whose step time is not finite.
fn finite(outcome: Outcome) -> Result<Outcome, CostError> {
    if outcome.step_time.0.is_finite() {
        Ok(outcome)
    } else {
        Err(CostError::Endless)
    }
}
