//! The entry point: prices of one scenario, with layer costs and programs remembered.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use dtensor::RoutedRows;
use plans::{Floors, Prediction, Schedule, ScheduleKind, Strategy, Timeline, program};
use rustc_hash::FxHashMap;

use catalog::runtime::Rewrite;
use catalog::{Bytes, Fitted, LayerClass, Seconds};

use crate::assemble::{Assembled, assemble};
use crate::block::{BlockCost, BlockKey, BlockPricing};
use crate::engine::{Inputs, Outcome, Record, simulate};
use crate::held::Held;
use crate::local::Local;
use crate::price::{Prices, ProfilePrices};
use crate::profile::InFlight;
use crate::recorder::Recorder;
use crate::shared_cores::Busy;
use crate::{CostError, Scenario, floors, held, local, peak, predict, quantities};

/// Prices strategies of one scenario. Thread-safe; remembers block costs by local shape and
/// programs by schedule.
#[derive(Debug)]
pub struct CostModel {
    scenario: Scenario,
    prices: Prices,
    layer_classes: Vec<LayerClass>,
    blocks: RwLock<FxHashMap<BlockKey, Arc<BlockCost>>>,
    schedules: RwLock<FxHashMap<ScheduleKey, Arc<Pipeline>>>,
    programs: RwLock<FxHashMap<ProgramKey, Arc<program::Program>>>,
}

type ScheduleKey = (ScheduleKind, u64, u64, u64);
type ProgramKey = (ScheduleKey, catalog::Zero, bool);

/// A schedule with what follows from its order alone.
#[derive(Debug)]
pub struct Pipeline {
    /// The action lists.
    pub schedule: Schedule,
    /// Rank of every virtual stage, shared.
    pub rank_of_stage: Arc<Vec<u32>>,
    /// Micro-batches in flight, per rank.
    pub in_flight: InFlight,
}

/// Time and memory of a simulated strategy, without the names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Time of one step.
    pub step_time: Seconds,
    /// Peak of the heaviest rank.
    pub peak_memory: Bytes,
    /// Whether the peak is within capacity less headroom.
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

    /// A cost model for a scenario, with other values of the fitted constants than the shipped.
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
            scenario.runtime = local::adapted(scenario.runtime, gpus)?;
        }
        let prices =
            Prices::new(&scenario.cluster, scenario.workload.gpus, fitted).map_err(|e| {
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
        let mut layer_classes: Vec<LayerClass> = (0..scenario.model.layers)
            .map(|i| scenario.model.layer_class(i))
            .collect();
        layer_classes.sort_unstable();
        layer_classes.dedup();
        Ok(Self {
            scenario,
            prices,
            layer_classes,
            blocks: RwLock::default(),
            schedules: RwLock::default(),
            programs: RwLock::default(),
        })
    }

    /// What it was made for.
    #[must_use]
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Device and network prices.
    #[must_use]
    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// The distinct decoder layers of the model.
    #[must_use]
    pub fn layer_classes(&self) -> &[LayerClass] {
        &self.layer_classes
    }

    /// Device memory that a strategy may use.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        let total = self.scenario.cluster.device.memory.value.as_f64();
        Bytes((total * (1.0 - self.scenario.headroom)) as u64)
    }

    /// Lower bounds on time and memory, without simulation.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn floors(&self, strategy: &Strategy) -> Result<Floors, CostError> {
        let pipeline = self.pipeline(strategy)?;
        let assembled = assemble(self, strategy, Arc::clone(&pipeline.rank_of_stage))?;
        Ok(floors::floors(self, strategy, &assembled, &pipeline))
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
        let peak_memory = self.with_fragmentation(peak);
        Ok(Score {
            step_time: outcome.step_time,
            peak_memory,
            fits: peak_memory <= self.capacity(),
        })
    }

    /// Simulates a strategy and names everything.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn predict(&self, strategy: &Strategy) -> Result<Prediction, CostError> {
        let (assembled, outcome) = self.simulated(strategy, &mut ())?;
        let program = self.program(strategy)?;
        Ok(predict::prediction(
            self, strategy, &assembled, &outcome, &program,
        ))
    }

    /// The simulated step, event by event.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn timeline(&self, strategy: &Strategy) -> Result<Timeline, CostError> {
        let mut recorder = Recorder::new(strategy.pp as u32);
        self.simulated(strategy, &mut recorder)?;
        Ok(recorder.finish())
    }

    /// What every pipeline rank's heaviest peer holds from action to action, by kind: what our own
    /// executor counts.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn held(&self, strategy: &Strategy) -> Result<Vec<Held>, CostError> {
        let pipeline = self.pipeline(strategy)?;
        let assembled = assemble(self, strategy, Arc::clone(&pipeline.rank_of_stage))?;
        held::held(&assembled, &*self.program(strategy)?)
    }

    /// The most that every pipeline rank's heaviest peer has in use on its GPU, as our own executor counts it:
    /// buffers as they were asked for.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn peaks(&self, strategy: &Strategy) -> Result<Vec<Bytes>, CostError> {
        let pipeline = self.pipeline(strategy)?;
        let assembled = assemble(self, strategy, Arc::clone(&pipeline.rank_of_stage))?;
        peak::peaks(self, strategy, &assembled, &*self.program(strategy)?)
    }

    /// The most bytes that one rank keeps for backward; [`CostModel::held`] gives the same for the heaviest
    /// rank. `rows` gives the rows that this rank's experts receive, for each micro-batch and layer. The
    /// rank is given by its pipeline rank and its tensor-parallel rank, because the last tensor-parallel
    /// ranks keep less where their number does not divide the vocabulary.
    ///
    /// # Errors
    /// When a block cannot be traced.
    pub fn peak_saved(
        &self,
        strategy: &Strategy,
        [pp, tp]: [u64; 2],
        rows: &BTreeMap<(u32, u64), RoutedRows>,
    ) -> Result<Bytes, CostError> {
        let pipeline = self.pipeline(strategy)?;
        let assembled = assemble(self, strategy, Arc::clone(&pipeline.rank_of_stage))?;
        let actions = &self.program(strategy)?.ranks[pp as usize];
        held::of_rank(self, strategy, &assembled, (actions, tp), rows)
    }

    /// Allocated memory as the allocator reserves it.
    #[must_use]
    pub fn with_fragmentation(&self, peak: Bytes) -> Bytes {
        let overheads = &self.scenario.runtime.overheads;
        let outside = overheads.context.value;
        let inside = peak.saturating_sub(outside);
        Bytes((inside.as_f64() * overheads.fragmentation.value) as u64) + outside
    }

    fn simulated(
        &self,
        strategy: &Strategy,
        record: &mut impl Record,
    ) -> Result<(Assembled, Outcome), CostError> {
        let pipeline = self.pipeline(strategy)?;
        let program = self.program(strategy)?;
        let assembled = assemble(self, strategy, Arc::clone(&pipeline.rank_of_stage))?;
        let overheads = &self.scenario.runtime.overheads;
        let inputs = Inputs {
            ranks: &program.ranks,
            stages: &assembled.stages,
            transfer: assembled.transfer,
            transfer_overlaps: strategy.overlap.pipeline && !self.shares_cores(),
            micro_batches: strategy.num_micro_batches as u32,
            overlap_slowdown: overheads.overlap_slowdown.value,
            optimizer: &assembled.optimizer,
            resident: &assembled.resident,
            optimizer_transient: &assembled.optimizer_transient,
            step_overhead: overheads.step.value,
        };
        let Some(cores) = self.cores() else {
            let outcome = finite(simulate(&inputs, record))?;
            return Ok((assembled, outcome));
        };
        let mut busy = Busy::default();
        let mut outcome = simulate(&inputs, &mut busy);
        let peers = self.scenario.workload.gpus / strategy.pp;
        busy.stretch(&mut outcome, peers, cores, record);
        Ok((assembled, finite(outcome)?))
    }

    /// Prices of our executor on this machine.
    pub(crate) fn local<'p>(&self, prices: &'p ProfilePrices) -> Local<'p> {
        Local {
            prices,
            precision: self.scenario.workload.precision,
        }
    }

    /// Cores that ranks share, where they do.
    fn cores(&self) -> Option<u64> {
        let machine = &self.scenario.cluster.profile.as_ref()?.machine;
        machine.gpu.is_none().then_some(machine.cores)
    }

    /// Whether communication is work of the ranks' own cores.
    pub(crate) fn shares_cores(&self) -> bool {
        self.cores().is_some()
    }

    /// The cost of a block, from memory when its local shape was priced before.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub fn block(&self, key: &BlockKey) -> Result<Arc<BlockCost>, CostError> {
        remembered(&self.blocks, key, || {
            let pricing = BlockPricing {
                model: &self.scenario.model,
                runtime: &self.scenario.runtime,
                prices: &self.prices,
                precision: self.scenario.workload.precision,
            };
            pricing.cost(key)
        })
    }

    pub(crate) fn pipeline(&self, strategy: &Strategy) -> Result<Arc<Pipeline>, CostError> {
        let key = schedule_key(strategy);
        remembered(&self.schedules, &key, || {
            let (kind, pp, vpp, micro_batches) = key;
            let schedule = plans::schedule::build(kind, pp, vpp, micro_batches)
                .map_err(|e| CostError::Trace(e.to_string()))?;
            let in_flight = InFlight::of(&schedule);
            let rank_of_stage = Arc::new(schedule.rank_of_stage.clone());
            Ok(Pipeline {
                schedule,
                rank_of_stage,
                in_flight,
            })
        })
    }

    fn program(&self, strategy: &Strategy) -> Result<Arc<program::Program>, CostError> {
        let key = (
            schedule_key(strategy),
            strategy.zero,
            strategy.reshard_after_forward,
        );
        remembered(&self.programs, &key, || {
            Ok(program::lower(&self.pipeline(strategy)?.schedule, strategy))
        })
    }
}

/// An outcome whose step ends.
fn finite(outcome: Outcome) -> Result<Outcome, CostError> {
    if outcome.step_time.0.is_finite() {
        Ok(outcome)
    } else {
        Err(CostError::Endless)
    }
}

fn schedule_key(strategy: &Strategy) -> ScheduleKey {
    (
        strategy.schedule,
        strategy.pp,
        strategy.vpp,
        strategy.num_micro_batches,
    )
}

/// Looks a value up, or makes and stores it. Two threads may make the same value; both are equal.
fn remembered<K: Clone + Eq + std::hash::Hash, V>(
    memo: &RwLock<FxHashMap<K, Arc<V>>>,
    key: &K,
    make: impl FnOnce() -> Result<V, CostError>,
) -> Result<Arc<V>, CostError> {
    let poisoned = "no thread panics while holding the memo";
    if let Some(found) = memo.read().expect(poisoned).get(key) {
        return Ok(Arc::clone(found));
    }
    let value = Arc::new(make()?);
    let mut memo = memo.write().expect(poisoned);
    Ok(Arc::clone(memo.entry(key.clone()).or_insert(value)))
}
