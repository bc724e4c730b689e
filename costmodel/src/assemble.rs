//! Turns a strategy into the engine's inputs: the work of every virtual stage, and the memory and optimizer time of
//! every pipeline rank. Stages that consist of the same blocks form a class and are computed once.

use std::sync::Arc;

use catalog::{Bytes, Seconds};
use models::BlockClass;
use plans::{Decisions, Recompute, Zero};

use crate::block_cost::BlockCost;
use crate::block_set::Blocks;
use crate::blocks::BlockCosts;
use crate::of_rank::{HeldByRank, Largest, OfRank};
use crate::offload;
use crate::passed_on::Position;
use crate::pipeline::Pipeline;
use crate::shared_tables::{self, SharedTables};
use crate::stage::{Run, StageWork};
use crate::stage_traffic::Traffic;
use crate::states::{self, StateBytes, Weights};
use crate::traffic::DataParallel;
use crate::{CostError, Scenario, block_cost, drained, graphed, passed_on};

/// Everything the engine and the reports need to know about a strategy.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// The distinct stages.
    pub classes: Vec<StageClass>,
    /// For every virtual stage, the index of its class.
    pub class_of_stage: Vec<u32>,
    /// The schedule: which pipeline rank runs each stage, and how many micro-batches each rank has in flight.
    pub pipeline: Arc<Pipeline>,
    /// Memory and optimizer step of every pipeline rank.
    pub ranks: Vec<OfRank>,
    /// Time to send one micro-batch's output from each virtual stage but the last to the next one,
    /// if that is on another rank. The gradient of that output takes as long on its way back.
    pub transfers: Vec<Seconds>,
    /// Least time that the link between pools needs for the messages of a step; 0 without a link.
    pub on_link: Seconds,
}

/// A virtual stage, or several with the same blocks.
#[derive(Clone, Debug)]
pub struct StageClass {
    span: Span,
    /// Its blocks in the order of a forward pass; equal blocks that follow each other are one row.
    pub runs: Vec<Run>,
    /// Its work and memory for one micro-batch.
    pub work: StageWork,
    /// Number of the stage's parameters that one rank holds.
    weights: Weights,
    /// Bytes of their states on the device. ZeRO shards each virtual stage by itself.
    states: StateBytes,
    largest: Largest,
    /// Number of trained parameter tensors of the stage.
    tensors: u64,
    /// Number of trained parameters on one rank in blocks that tensor parallelism splits.
    divided: u64,
}

/// Builds what the engine simulates for a strategy: the work of its stages, and its ranks' memory and optimizer time.
/// `parallel` are the groups over which states are sharded and gradients reduced.
///
/// # Errors
/// When a block cannot be traced.
pub fn assemble(
    costs: &BlockCosts,
    strategy: &Decisions,
    parallel: &DataParallel,
    pipeline: &Arc<Pipeline>,
) -> Result<Assembled, CostError> {
    let blocks = costs.blocks_of(strategy)?;
    let mut built = Assembled {
        transfers: vec![costs.transfer(strategy, blocks.output())?; strategy.stages.0.len() - 1],
        classes: Vec::with_capacity(4),
        class_of_stage: Vec::with_capacity(strategy.stages.0.len()),
        ranks: Vec::with_capacity(strategy.pp as usize),
        on_link: Seconds(0.0),
        pipeline: Arc::clone(pipeline),
    };
    built.stages(costs, strategy, parallel, &blocks)?;
    built.ranks(costs, strategy, parallel)?;
    built.shared_table(costs, strategy)?;
    Ok(built)
}

impl Assembled {
    /// Pipeline rank of every virtual stage.
    #[must_use]
    pub fn rank_of_stage(&self) -> &[u32] {
        &self.pipeline.rank_of_stage
    }

    /// The work of a virtual stage.
    #[must_use]
    pub fn stage(&self, stage: usize) -> &StageWork {
        &self.classes[self.class_of_stage[stage] as usize].work
    }

    /// The blocks of a virtual stage.
    #[must_use]
    pub fn runs(&self, stage: usize) -> &[Run] {
        &self.classes[self.class_of_stage[stage] as usize].runs
    }

    /// Whether some stage gathers parameters or reduces gradients in an action of its own.
    pub(crate) fn has_messages_apart(&self) -> bool {
        let mut stages = self.classes.iter().map(|class| &class.work);
        stages.any(|work| work.exposed_gather.is_some() || work.exposed_reduce.is_some())
    }

    /// Number of parameters that each pipeline rank holds.
    pub(crate) fn weights_of_ranks(&self) -> Vec<Weights> {
        let mut held = vec![Weights::default(); self.ranks.len()];
        for (&class, &rank) in self.class_of_stage.iter().zip(self.rank_of_stage()) {
            held[rank as usize] += self.classes[class as usize].weights;
        }
        held
    }

    /// The shortest update of any pipeline rank, counted from when its last gradient is ready.
    pub(crate) fn least_update(&self) -> Seconds {
        let updates = self.ranks.iter().map(OfRank::update);
        updates.reduce(Seconds::min).unwrap_or_default()
    }

    fn stages(
        &mut self,
        costs: &BlockCosts,
        strategy: &Decisions,
        parallel: &DataParallel,
        blocks: &Blocks,
    ) -> Result<(), CostError> {
        let mut traffic = Traffic::new(costs.scenario(), strategy, parallel);
        let last = strategy.stages.0.len() - 1;
        let mut first_layer = 0;
        for (index, &count) in strategy.stages.0.iter().enumerate() {
            let span = Span {
                first_layer,
                layers: count as usize,
                as_first: strategy.layers_as_first(index),
                position: Position {
                    ends: [index == 0, index == last],
                    on_one_rank: self.shares_rank(index),
                },
            };
            first_layer += span.layers;
            let same = |class: &StageClass| class.span.has_blocks_of(&span, costs);
            let class = match self.classes.iter().rposition(same) {
                Some(class) => class,
                None => {
                    let runs = runs(costs, strategy, blocks, &span);
                    let class = StageClass::new(costs, &mut traffic, span, blocks.output(), runs)?;
                    self.classes.push(class);
                    self.classes.len() - 1
                }
            };
            self.class_of_stage.push(class as u32);
        }
        Ok(())
    }

    /// Whether the stage before this one, and the stage after it, are on the same rank as it is.
    fn shares_rank(&self, stage: usize) -> [bool; 2] {
        let owners = self.rank_of_stage();
        let neighbours = [stage.checked_sub(1), Some(stage + 1)];
        neighbours.map(|of| of.is_some_and(|of| owners.get(of) == Some(&owners[stage])))
    }

    fn ranks(
        &mut self,
        costs: &BlockCosts,
        strategy: &Decisions,
        parallel: &DataParallel,
    ) -> Result<(), CostError> {
        let activations = self.activations_on_host(strategy);
        let ranks = &self.pipeline.stages_of_rank;
        let class_of = |&stage: &u32| self.class_of_stage[stage as usize];
        let same = |a: &[u32], b: &[u32]| a.iter().map(class_of).eq(b.iter().map(class_of));
        for (rank, stages) in ranks.iter().enumerate() {
            // Most ranks hold the same as the rank before.
            let before = rank.checked_sub(1);
            let of = match before.filter(|&before| same(&ranks[before], stages)) {
                Some(before) => self.ranks[before],
                None => {
                    let classes = stages.iter().map(class_of);
                    let held = held(classes.map(|class| &self.classes[class as usize]));
                    let of = OfRank::new(costs, strategy, parallel, held)?;
                    let on_host = of.on_host + activations;
                    OfRank { on_host, ..of }
                }
            };
            self.ranks.push(of);
        }
        Ok(())
    }

    /// Adds the exchange of a table's gradients between the pipeline's ends, if both hold the table
    /// (`_allreduce_word_embedding_grads`, `finalize_model_grads.py`, NVIDIA/Megatron-LM@d98e8a6).
    fn shared_table(&mut self, costs: &BlockCosts, strategy: &Decisions) -> Result<(), CostError> {
        let scenario = costs.scenario();
        let owners = self.rank_of_stage();
        let ends = [owners[0], owners[owners.len() - 1]].map(|rank| rank as usize);
        let both = scenario.model.tied_embeddings || scenario.model.mtp_layers > 0;
        if ends[0] == ends[1] || !both || scenario.model.adapters.is_some() {
            return Ok(());
        }
        let precision = scenario.workload.precision;
        let types = strategy.state_types(&scenario.runtime, precision);
        let elements = shared_tables::table(scenario, strategy);
        let table = Bytes(elements * types.reduce.size());
        let time = costs.book.sum_over_ends(strategy, table)?;
        for rank in ends {
            self.ranks[rank].shared_table = time;
        }
        Ok(())
    }

    /// Bytes of saved activations in a rank's host memory: all of one stage, as `pp` is 1 then.
    fn activations_on_host(&self, strategy: &Decisions) -> Bytes {
        let mut bytes = Bytes(0);
        for class in self.classes.iter().filter(|_| strategy.offload_layers > 0) {
            let on_host = class.runs.iter().filter(|run| run.on_host);
            let saved = on_host.map(|run| run.cost.memory.saved_bytes * run.count);
            bytes += saved.sum::<Bytes>();
        }
        bytes
    }
}

/// Adds up the weights, states and parameter tensors of a rank's stages, and finds the sizes of their largest blocks.
fn held<'a>(stages: impl Iterator<Item = &'a StageClass>) -> HeldByRank {
    let mut held = HeldByRank::default();
    for stage in stages {
        held.weights += stage.weights;
        held.states += stage.states;
        held.largest = held.largest.or(stage.largest);
        held.tensors += stage.tensors;
        held.divided += stage.divided;
        held.buffers += stage.work.passed_on.buffers;
    }
    held
}

/// Which blocks a virtual stage consists of.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Index of its first layer in the model.
    first_layer: usize,
    /// Number of its layers.
    layers: usize,
    /// How many layers count as first in [`plans::Recompute::of_first_and_others`].
    as_first: u64,
    /// Where it lies in the pipeline. The first has the embedding, the last the head.
    position: Position,
}

impl Span {
    /// The classes of its layers.
    fn classes<'c>(&self, costs: &'c BlockCosts) -> &'c [u8] {
        &costs.class_of_layer[self.first_layer..][..self.layers]
    }

    /// Whether two stages consist of the same blocks in the same order.
    fn has_blocks_of(&self, other: &Self, costs: &BlockCosts) -> bool {
        let sizes = |span: &Self| (span.layers, span.as_first, span.position);
        sizes(self) == sizes(other) && self.classes(costs) == other.classes(costs)
    }
}

/// The blocks of a stage in the order of a forward pass; equal blocks that follow each other are one row.
fn runs(costs: &BlockCosts, strategy: &Decisions, blocks: &Blocks, span: &Span) -> Vec<Run> {
    let mut runs = Vec::with_capacity(4);
    if span.position.ends[0] {
        push(&mut runs, &blocks.embedding, 1, false);
    }
    let layers = span.classes(costs);
    let kind = |layer: usize| {
        let offset = layer as u64;
        let as_first = offset < span.as_first;
        (layers[layer], as_first, offset < strategy.offload_layers)
    };
    let mut first = 0;
    while first < layers.len() {
        let of = kind(first);
        let alike = (first..layers.len()).take_while(|&layer| kind(layer) == of);
        let count = alike.count();
        first += count;
        let (class, as_first, on_host) = of;
        let [others, first_of_stage] = &blocks.layers[usize::from(class)];
        let cost = if as_first { first_of_stage } else { others };
        push(&mut runs, cost, count as u64, on_host);
    }
    if span.position.ends[1] {
        if let Some(mtp) = &blocks.mtp {
            push(&mut runs, mtp, costs.scenario().model.mtp_layers, false);
        }
        push(&mut runs, &blocks.head, 1, false);
    }
    runs
}

fn push(runs: &mut Vec<Run>, cost: &Arc<BlockCost>, count: u64, on_host: bool) {
    match runs.last_mut() {
        Some(run) if Arc::ptr_eq(&run.cost, cost) && run.on_host == on_host => {
            run.count += count;
        }
        _ => runs.push(Run {
            count,
            on_host,
            cost: Arc::clone(cost),
        }),
    }
}

impl StageClass {
    fn new(
        costs: &BlockCosts,
        traffic: &mut Traffic<'_>,
        span: Span,
        sent: Bytes,
        runs: Vec<Run>,
    ) -> Result<Self, CostError> {
        let Traffic {
            scenario,
            strategy,
            parallel,
            ..
        } = *traffic;
        let mut work = StageWork::default();
        let casts = Casts::of(scenario, strategy);
        for run in &runs {
            let count = run.count as f64;
            work.forward += run.cost.forward * count;
            work.backward += run.cost.backward * count;
            work.recompute += run.cost.recompute * count;
            work.saved += casts.kept(run);
            work.saved_for_weight += run.cost.memory.saved_for_weight * run.count;
        }
        passed_on::hold(scenario, strategy, span.position, sent, &runs, &mut work);
        let tables = SharedTables::of(scenario, strategy, &runs);
        let weights = weights(&tables, &runs);
        transients(&mut work, &runs, casts);
        work.saved = work.saved.saturating_sub(work.passed_on.input);
        if strategy.overlap.expert_parallel && strategy.ep > 1 {
            // While one micro-batch runs a layer's backward, another runs a layer's forward.
            let is_layer = |run: &&Run| matches!(run.cost.key.class, BlockClass::Layer(_));
            let forward =
                |run: &Run| run.cost.memory.saved_bytes + run.cost.memory.transient_forward;
            let held = runs.iter().filter(is_layer).map(forward).max();
            work.transient_backward += held.unwrap_or_default();
        }
        graphed::hold(scenario, strategy, &runs, &mut work);
        costs.book.data_parallel(traffic, &runs, &mut work)?;
        drained::wait(scenario, strategy, &runs, &mut work);
        let mut states = offload::states_on_device(scenario, strategy, &parallel.sharding, weights);
        states.moments += wider_moments(scenario, strategy, parallel, &runs);
        let tensors = |run: &Run| run.cost.tensors.reduced * run.count;
        Ok(Self {
            largest: largest(&tables, &runs),
            tensors: runs.iter().map(tensors).sum(),
            divided: divided(scenario, strategy, &tables, &runs),
            span,
            runs,
            work,
            weights,
            states,
        })
    }
}

/// Extra bytes of the optimizer's moments for a stage's embedding table, if their type is wider. The Trainer asks for wider ones only of
/// bitsandbytes, which cannot update the shards of FSDP2 (transformers, `Trainer.create_optimizer`); torchao's moments
/// have 8 bits everywhere.
fn wider_moments(
    scenario: &Scenario,
    strategy: &Decisions,
    parallel: &DataParallel,
    runs: &[Run],
) -> Bytes {
    if strategy.zero == Zero::Z3 {
        return Bytes(0);
    }
    let types = strategy.state_types(&scenario.runtime, scenario.workload.precision);
    let mut tables = runs.iter();
    let table = tables.find(|run| run.cost.key.class == BlockClass::Embedding);
    let updated = table.map(|table| parallel.sharding.updated(table.cost.weights.trained));
    Bytes(updated.map_or(0, |updated| types.wider_moments(updated)))
}

/// Number of trained parameters on one rank in blocks that tensor parallelism splits.
fn divided(scenario: &Scenario, strategy: &Decisions, tables: &SharedTables, runs: &[Run]) -> u64 {
    let is_divided = |run: &&Run| block_cost::layout(scenario, strategy, run.cost.key.class).tp > 1;
    let elements = |run: &Run| tables.own(run).trained.total() * run.count;
    runs.iter().filter(is_divided).map(elements).sum()
}

/// Sizes of the largest blocks of a virtual stage, on one rank.
fn largest(tables: &SharedTables, runs: &[Run]) -> Largest {
    let of_run = |run: &Run| {
        let is_end = matches!(run.cost.key.class, BlockClass::Embedding | BlockClass::Head);
        Largest::of(tables.own(run), is_end).with_tensor(run.cost.tensors.largest)
    };
    runs.iter()
        .map(of_run)
        .fold(Largest::default(), Largest::or)
}

/// Numbers of weights of a virtual stage that one rank holds.
fn weights(tables: &SharedTables, runs: &[Run]) -> Weights {
    let mut weights = Weights::default();
    for run in runs {
        weights += tables.own(run) * run.count;
    }
    weights
}

/// Bytes that a row of blocks keeps on the device from forward to backward.
fn kept(run: &Run) -> Bytes {
    match run.on_host {
        true => Bytes(0),
        false => run.cost.memory.saved_bytes * run.count,
    }
}

/// The casts of weights that autocast makes in a forward pass, where no rank gathers weights in the type in which kernels read them.
/// Autocast holds all of them until the model's forward ends (PyTorch's `autocast_mode.cpp`, `cached_cast` and `clear_cache`; accelerate
/// enters it for that long, `accelerator.py`, `prepare_model`). From then on autograd holds those that backward reads. Layers that
/// run again in backward keep none: each makes its own anew, and frees them.
#[derive(Clone, Copy, Debug)]
struct Casts {
    /// Bytes of an element of a cast; 0 where there are no casts.
    element: u64,
}

impl Casts {
    fn of(scenario: &Scenario, strategy: &Decisions) -> Self {
        let by_block = scenario.runtime.works_by_block(strategy.zero);
        let casts = states::casts_whole(scenario, strategy.zero) && !by_block;
        let narrow = scenario.workload.precision.activation().size();
        Self {
            element: if casts { narrow } else { 0 },
        }
    }

    /// Bytes of the casts of one block. Looking up rows of a table casts nothing.
    fn one(self, run: &Run) -> Bytes {
        match run.cost.key.class {
            BlockClass::Embedding => Bytes(0),
            BlockClass::Layer(_) | BlockClass::Head | BlockClass::Mtp => {
                Bytes(run.cost.weights.trained.total() * self.element)
            }
        }
    }

    /// Bytes of the casts that one block makes anew in backward.
    fn again(self, run: &Run) -> Bytes {
        let is_layer = matches!(run.cost.key.class, BlockClass::Layer(_));
        match is_layer && run.cost.key.recompute == Recompute::Full {
            true => self.one(run),
            false => Bytes(0),
        }
    }

    /// Bytes that a row of blocks keeps on the device from forward to backward, casts included.
    fn kept(self, run: &Run) -> Bytes {
        kept(run) + (self.one(run) - self.again(run)) * run.count
    }
}

/// Bytes of the layer that is on its way to host memory or back.
fn window(runs: &[Run]) -> Bytes {
    let on_host = runs.iter().filter(|run| run.on_host);
    let saved = on_host.map(|run| run.cost.memory.saved_bytes);
    saved.max().unwrap_or_default()
}

/// Sets a stage's peak memory beyond the saved activations: in forward, earlier blocks' activations are already held;
/// in backward, those of later blocks are already released.
fn transients(stage: &mut StageWork, runs: &[Run], casts: Casts) {
    // While layers run, the layer being copied to or from host memory is held too.
    let window = window(runs);
    let beside = |run: &Run| match run.cost.key.class {
        BlockClass::Layer(_) => window,
        _ => Bytes(0),
    };
    let mut held = Bytes(0);
    let mut peak = Bytes(0);
    for run in runs {
        held += casts.kept(run) + casts.again(run) * run.count;
        peak = peak.max(held + beside(run) + run.cost.memory.transient_forward);
    }
    stage.transient_forward = peak.saturating_sub(stage.saved);
    let mut released = Bytes(0);
    let mut peak = Bytes(0);
    for run in runs.iter().rev() {
        let own = beside(run) + casts.again(run) + run.cost.memory.transient_backward;
        peak = peak.max(own.saturating_sub(released));
        released += casts.kept(run);
    }
    stage.transient_backward = peak;
}
