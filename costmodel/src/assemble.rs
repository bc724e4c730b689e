//! Turns a strategy into the engine's inputs: the work of every virtual stage, and the memory and optimizer time of
//! every pipeline rank.

use std::sync::Arc;

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType, LayerClass, Seconds};
use models::BlockClass;
use plans::{Recompute, Strategy, Zero};

use crate::CostError;
use crate::block_cost::{BlockCost, BlockKey};
use crate::blocks::BlockCosts;
use crate::book::Update;
use crate::stage::{Run, StageWork};
use crate::states::{self, Elements, StateBytes};
use crate::traffic::DataParallel;

/// Everything the engine and the reports need to know about a strategy.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// For every virtual stage: its blocks in order, equal neighbours grouped.
    pub runs: Vec<Vec<Run>>,
    /// Work of every virtual stage.
    pub stages: Vec<StageWork>,
    /// Pipeline rank of every virtual stage.
    pub rank_of_stage: Arc<Vec<u32>>,
    /// Parameters, gradients and optimizer states of every pipeline rank, in bytes.
    pub states: Vec<StateBytes>,
    /// For every pipeline rank: bytes of parameters that are gathered, and of gradients that are not yet reduced, at
    /// one time.
    pub in_flight: Vec<Bytes>,
    /// Optimizer time of every pipeline rank.
    pub optimizer: Vec<Seconds>,
    /// Memory held for the whole step by every pipeline rank.
    pub resident: Vec<Bytes>,
    /// Memory that only the optimizer step needs, of every pipeline rank.
    pub optimizer_transient: Vec<Bytes>,
    /// Time of one pipeline transfer between neighbouring ranks.
    pub transfer: Seconds,
}

/// The block costs that a strategy's stages are built from, looked up once.
struct Blocks {
    embedding: Arc<BlockCost>,
    head: Arc<BlockCost>,
    mtp: Option<Arc<BlockCost>>,
    /// For every layer class: the cost of a stage's last layer, and of its first, which `Layers` may recompute.
    layers: Vec<(LayerClass, Arc<BlockCost>, Arc<BlockCost>)>,
}

/// Builds what the engine simulates for a strategy: the work of its stages, and its ranks' memory and optimizer time.
///
/// # Errors
/// When a block cannot be traced.
pub fn assemble(
    costs: &BlockCosts,
    strategy: &Strategy,
    rank_of_stage: Arc<Vec<u32>>,
) -> Result<Assembled, CostError> {
    let blocks = Blocks::look_up(costs, strategy)?;
    let parallel = DataParallel::new(strategy, &costs.scenario().cluster);
    let runs = blocks.stage_runs(costs, strategy);
    let stages = stages(costs, strategy, &parallel, &runs)?;
    let mut built = Assembled {
        transfer: blocks.transfer(costs, strategy)?,
        states: Vec::new(),
        in_flight: Vec::new(),
        optimizer: Vec::new(),
        resident: Vec::new(),
        optimizer_transient: Vec::new(),
        runs,
        stages,
        rank_of_stage,
    };
    for rank in 0..strategy.pp as u32 {
        built.rank(costs, strategy, &parallel, rank)?;
    }
    Ok(built)
}

impl Assembled {
    fn rank(
        &mut self,
        costs: &BlockCosts,
        strategy: &Strategy,
        parallel: &DataParallel,
        rank: u32,
    ) -> Result<(), CostError> {
        let scenario = costs.scenario();
        let types = &scenario.runtime.states;
        let precision = scenario.workload.precision;
        let mut elements = Elements::default();
        let mut bytes = StateBytes::default();
        let mut largest = 0u64;
        for (stage, (runs, &owner)) in self.runs.iter().zip(self.rank_of_stage.iter()).enumerate() {
            if owner == rank {
                for run in runs {
                    let e = run.cost.elements;
                    largest = largest.max(e.dense + e.expert);
                }
                let of_stage = stage_elements(costs, strategy, runs, stage);
                elements += of_stage;
                // ZeRO shards every virtual stage by itself: the states of each are one buffer.
                bytes += parallel.sharding.states(of_stage, types, precision);
            }
        }
        let in_flight = in_flight(strategy, costs, largest, elements);
        let update = Update {
            parallel,
            elements,
            gradients: bytes.gradients,
        };
        let time = costs.book().optimizer(scenario, strategy, &update)?;
        let overheads = &scenario.runtime.overheads;
        let copies = scenario
            .runtime
            .rewrites
            .contains(&Rewrite::CopyGradientsForStep);
        let copy = if copies {
            parallel.sharding.updated(elements) * DType::F32.size()
        } else {
            0
        };
        self.optimizer_transient.push(Bytes(copy));
        self.states.push(bytes);
        self.in_flight.push(in_flight);
        self.optimizer.push(time);
        self.resident
            .push(bytes.total() + in_flight + overheads.context.value + overheads.workspace.value);
        Ok(())
    }
}

/// Elements that a rank holds of a virtual stage. If one stage has both ends of the model, tied embeddings share one
/// table and count once.
fn stage_elements(costs: &BlockCosts, strategy: &Strategy, runs: &[Run], stage: usize) -> Elements {
    let model = &costs.scenario().model;
    let mut elements = Elements::default();
    for run in runs {
        elements += run.cost.elements * run.count;
    }
    if model.tied_embeddings && stage == 0 && strategy.stages.0.len() == 1 {
        elements.dense -= dtensor::placement::chunk_size(model.vocab, strategy.tp) * model.hidden;
    }
    elements
}

impl Blocks {
    fn look_up(costs: &BlockCosts, strategy: &Strategy) -> Result<Self, CostError> {
        let model = &costs.scenario().model;
        let key = |class: BlockClass, recompute: Recompute| {
            BlockKey::of(costs.scenario(), strategy, class, recompute)
        };
        // The recomputation of layers after the first `n` that `Layers(n)` recomputes.
        let mode = strategy.recompute.of_layer(u64::MAX);
        let mut layers = Vec::new();
        for &class in costs.layer_classes() {
            let as_asked = costs.block(&key(BlockClass::Layer(class), mode))?;
            let first = match strategy.recompute.of_layer(0) {
                same if same == mode => Arc::clone(&as_asked),
                other => costs.block(&key(BlockClass::Layer(class), other))?,
            };
            layers.push((class, as_asked, first));
        }
        // Runtimes do not recompute the embedding or the head.
        let mtp = if model.mtp_layers > 0 {
            Some(costs.block(&key(BlockClass::Mtp, mode))?)
        } else {
            None
        };
        Ok(Self {
            embedding: costs.block(&key(BlockClass::Embedding, Recompute::None))?,
            head: costs.block(&key(BlockClass::Head, Recompute::None))?,
            mtp,
            layers,
        })
    }

    /// Time to send one micro-batch's activation to the next pipeline rank.
    fn transfer(&self, costs: &BlockCosts, strategy: &Strategy) -> Result<Seconds, CostError> {
        if strategy.pp == 1 {
            return Ok(Seconds(0.0));
        }
        let layer = self.layers.first().map(|(_, asked, _)| asked.output);
        let output = layer.unwrap_or(self.embedding.output);
        costs.book().transfer(costs.scenario(), strategy, output)
    }

    fn stage_runs(&self, costs: &BlockCosts, strategy: &Strategy) -> Vec<Vec<Run>> {
        let model = &costs.scenario().model;
        let last = strategy.stages.0.len() - 1;
        let mut first_layer = 0;
        let mut stages = Vec::with_capacity(strategy.stages.0.len());
        for (index, &count) in strategy.stages.0.iter().enumerate() {
            let mut runs = Vec::with_capacity(4);
            if index == 0 {
                push(&mut runs, &self.embedding, 1);
            }
            for offset in 0..count {
                let class = model.layer_class(first_layer + offset);
                let (_, asked, first) = self
                    .layers
                    .iter()
                    .find(|(c, _, _)| *c == class)
                    .expect("every class of the model was looked up");
                let as_first =
                    strategy.recompute.of_layer(offset) == strategy.recompute.of_layer(0);
                let cost = if as_first { first } else { asked };
                push(&mut runs, cost, 1);
            }
            if index == last {
                if let Some(mtp) = &self.mtp {
                    push(&mut runs, mtp, model.mtp_layers);
                }
                push(&mut runs, &self.head, 1);
            }
            first_layer += count;
            stages.push(runs);
        }
        stages
    }
}

fn push(runs: &mut Vec<Run>, cost: &Arc<BlockCost>, count: u64) {
    match runs.last_mut() {
        Some(run) if Arc::ptr_eq(&run.cost, cost) => run.count += count,
        _ => runs.push(Run {
            count,
            cost: Arc::clone(cost),
        }),
    }
}

/// Work of every virtual stage. Most stages have the same blocks as an earlier one, so its work is reused.
fn stages(
    costs: &BlockCosts,
    strategy: &Strategy,
    parallel: &DataParallel,
    runs: &[Vec<Run>],
) -> Result<Vec<StageWork>, CostError> {
    let mut stages: Vec<StageWork> = Vec::with_capacity(runs.len());
    for (index, own) in runs.iter().enumerate() {
        let equal = (0..index)
            .rev()
            .take(2)
            .find(|&earlier| same(&runs[earlier], own));
        let work = match equal {
            Some(earlier) => stages[earlier].clone(),
            None => stage(costs, strategy, parallel, own)?,
        };
        stages.push(work);
    }
    Ok(stages)
}

fn same(a: &[Run], b: &[Run]) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(x, y)| x.count == y.count && Arc::ptr_eq(&x.cost, &y.cost))
}

fn stage(
    costs: &BlockCosts,
    strategy: &Strategy,
    parallel: &DataParallel,
    runs: &[Run],
) -> Result<StageWork, CostError> {
    let mut stage = StageWork::default();
    for run in runs {
        let count = run.count as f64;
        stage.forward += run.cost.forward * count;
        stage.backward += run.cost.backward * count;
        stage.recompute += run.cost.recompute * count;
        stage.saved += run.cost.memory.saved_bytes * run.count;
        stage.saved_for_weight += run.cost.memory.saved_for_weight * run.count;
    }
    let keeps_output = costs
        .scenario()
        .runtime
        .rewrites
        .contains(&Rewrite::KeepStageOutput);
    if strategy.pp > 1 && keeps_output {
        stage.saved += runs.last().map_or(Bytes(0), |run| run.cost.output);
    }
    transients(&mut stage, runs);
    costs
        .book()
        .data_parallel(costs.scenario(), strategy, parallel, runs, &mut stage)?;
    Ok(stage)
}

/// Sets a stage's peak memory beyond the saved activations: in forward, earlier blocks' activations are already held;
/// in backward, those of later blocks are already released.
fn transients(stage: &mut StageWork, runs: &[Run]) {
    let mut held = Bytes(0);
    let mut peak = Bytes(0);
    for run in runs {
        held += run.cost.memory.saved_bytes * run.count;
        peak = peak.max(held + run.cost.memory.transient_forward);
    }
    stage.transient_forward = peak.saturating_sub(stage.saved);
    let mut released = Bytes(0);
    let mut peak = Bytes(0);
    for run in runs.iter().rev() {
        peak = peak.max(run.cost.memory.transient_backward.saturating_sub(released));
        released += run.cost.memory.saved_bytes * run.count;
    }
    stage.transient_backward = peak;
}

/// ZeRO-3 holds two gathered blocks (current and prefetched) and one block's gradients before they
/// are reduced; ZeRO-2 holds one block's gradients.
fn in_flight(strategy: &Strategy, costs: &BlockCosts, largest: u64, held: Elements) -> Bytes {
    let scenario = costs.scenario();
    let compute = scenario.workload.precision.activation().size();
    let reduce = scenario.runtime.states.reduce.size();
    match strategy.zero {
        // The copies that autocast makes of all parameters live until the step's end.
        Zero::Z0 if states::casts_whole(scenario, strategy.zero) => {
            Bytes((held.dense + held.expert) * compute)
        }
        Zero::Z0 | Zero::Z1 => Bytes(0),
        Zero::Z2 => Bytes(largest * reduce),
        // Not resharded after forward: the parameters of every block, and also all their gradients when these
        // accumulate over several micro-batches.
        Zero::Z3 if !strategy.reshard_after_forward => {
            let whole = held.dense + held.expert;
            let gradients = if strategy.num_micro_batches > 1 {
                whole
            } else {
                largest
            };
            Bytes(whole * compute + gradients * reduce)
        }
        Zero::Z3 => Bytes(largest * (2 * compute + reduce)),
    }
}
