//! Turns a strategy into the engine's inputs: the work of every virtual stage, and the memory and optimizer time of
//! every pipeline rank. Stages that consist of the same blocks form a class and are computed once.

use std::sync::Arc;

use catalog::runtime::Rewrite;
use catalog::{AxisOrder, Bytes, LayerClass, Seconds};
use models::BlockClass;
use plans::{Decisions, Recompute};

use crate::block_cost::{BlockCost, BlockKey};
use crate::blocks::BlockCosts;
use crate::execution::Execution;
use crate::of_rank::{HeldByRank, Largest, OfRank};
use crate::offload::{self, HostStep};
use crate::stage::{Run, StageWork};
use crate::stage_traffic::Traffic;
use crate::states::{StateBytes, Weights};
use crate::traffic::DataParallel;
use crate::{CostError, graphed};

/// Everything the engine and the reports need to know about a strategy.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// The distinct stages.
    pub classes: Vec<StageClass>,
    /// For every virtual stage, the index of its class.
    pub class_of_stage: Vec<u32>,
    /// Pipeline rank of every virtual stage.
    pub rank_of_stage: Arc<Vec<u32>>,
    /// Parameters, gradients and optimizer states of every pipeline rank, in bytes.
    pub states: Vec<StateBytes>,
    /// For every pipeline rank: bytes of parameters that are gathered, and of gradients that are not yet reduced, at
    /// one time.
    pub in_flight: Vec<Bytes>,
    /// Optimizer time of every pipeline rank.
    pub optimizer: Vec<Seconds>,
    /// What the host of every pipeline rank does in its optimizer step.
    pub host: Vec<HostStep>,
    /// Bytes that every pipeline rank keeps in host memory.
    pub on_host: Vec<Bytes>,
    /// Memory held for the whole step by every pipeline rank.
    pub resident: Vec<Bytes>,
    /// Memory that only the optimizer step needs, of every pipeline rank.
    pub optimizer_transient: Vec<Bytes>,
    /// For every virtual stage but the last, the time to send one micro-batch's output to the next stage, or the gradient
    /// of that output back, if they lie on different ranks.
    pub transfers: Vec<Seconds>,
    /// Least time in which a link between pools carries what is sent over it in a step; 0 without such a link.
    pub on_link: Seconds,
}

/// A virtual stage, or several with the same blocks.
#[derive(Clone, Debug)]
pub struct StageClass {
    /// Its blocks in order, equal neighbours grouped.
    pub runs: Vec<Run>,
    /// Its work and memory for one micro-batch.
    pub work: StageWork,
    /// Elements that a rank holds of it.
    weights: Weights,
    /// Bytes of their states. ZeRO shards every virtual stage by itself: the states of each are one buffer.
    states: StateBytes,
    largest: Largest,
    /// Number of trained parameter tensors of the stage.
    tensors: u64,
}

/// The block costs that a strategy's stages are built from, looked up once.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) embedding: Arc<BlockCost>,
    pub(crate) head: Arc<BlockCost>,
    pub(crate) mtp: Option<Arc<BlockCost>>,
    /// For every layer class: the cost of a stage's last layer, and of its first, which `Layers` may recompute.
    pub(crate) layers: Vec<[Arc<BlockCost>; 2]>,
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
    rank_of_stage: Arc<Vec<u32>>,
) -> Result<Assembled, CostError> {
    let blocks = Blocks::look_up(costs, strategy)?;
    let ranks = strategy.pp as usize;
    let mut built = Assembled {
        transfers: vec![blocks.transfer(costs, strategy)?; strategy.stages.0.len() - 1],
        classes: Vec::with_capacity(4),
        class_of_stage: Vec::with_capacity(strategy.stages.0.len()),
        states: Vec::with_capacity(ranks),
        in_flight: Vec::with_capacity(ranks),
        optimizer: Vec::with_capacity(ranks),
        host: Vec::with_capacity(ranks),
        on_host: Vec::with_capacity(ranks),
        resident: Vec::with_capacity(ranks),
        optimizer_transient: Vec::with_capacity(ranks),
        on_link: Seconds(0.0),
        rank_of_stage,
    };
    built.stages(costs, strategy, parallel, &blocks)?;
    built.ranks(costs, strategy, parallel)?;
    Ok(built)
}

impl Assembled {
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

    /// Whether parameters of some stage are gathered, or its gradients reduced, by an action of its own rather than beside passes.
    pub(crate) fn has_messages_apart(&self) -> bool {
        let mut stages = self.classes.iter().map(|class| &class.work);
        stages.any(|work| work.exposed_gather.is_some() || work.exposed_reduce.is_some())
    }

    /// Elements that every pipeline rank holds.
    pub(crate) fn weights_of_ranks(&self) -> Vec<Weights> {
        let mut held = vec![Weights::default(); self.states.len()];
        for (&class, &rank) in self.class_of_stage.iter().zip(self.rank_of_stage.iter()) {
            held[rank as usize] += self.classes[class as usize].weights;
        }
        held
    }

    /// The least time that some pipeline rank takes for its update, after its last gradient is there.
    pub(crate) fn least_update(&self) -> Seconds {
        let ranks = self.optimizer.iter().zip(&self.host);
        let updates = ranks.map(|(&device, host)| device.max(host.total()));
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
        let mut spans: Vec<Span<'_>> = Vec::with_capacity(4);
        let mut first_layer = 0;
        for (index, &count) in strategy.stages.0.iter().enumerate() {
            let end = first_layer + count as usize;
            let span = Span {
                layers: &costs.class_of_layer()[first_layer..end],
                as_first: strategy.layers_as_first(index),
                ends: [index == 0, index == last],
            };
            first_layer = end;
            let known = spans.iter().rposition(|earlier| *earlier == span);
            let class = match known {
                Some(class) => class,
                None => {
                    let runs = blocks.runs(costs, strategy, span);
                    let class = StageClass::new(costs, &mut traffic, runs)?;
                    self.classes.push(class);
                    spans.push(span);
                    spans.len() - 1
                }
            };
            self.class_of_stage.push(class as u32);
        }
        Ok(())
    }

    fn ranks(
        &mut self,
        costs: &BlockCosts,
        strategy: &Decisions,
        parallel: &DataParallel,
    ) -> Result<(), CostError> {
        let mut held = vec![HeldByRank::default(); strategy.pp as usize];
        for (&class, &rank) in self.class_of_stage.iter().zip(self.rank_of_stage.iter()) {
            let class = &self.classes[class as usize];
            let of_rank = &mut held[rank as usize];
            of_rank.weights += class.weights;
            of_rank.states += class.states;
            of_rank.largest = of_rank.largest.or_largest(class.largest);
            of_rank.tensors += class.tensors;
        }
        let activations = self.activations_on_host(strategy);
        // Most ranks hold the same as the rank before, whose entries are then taken over.
        let mut known: Option<(HeldByRank, OfRank)> = None;
        for held in held {
            let of = match known {
                Some((same, of)) if same == held => of,
                _ => OfRank::new(costs, strategy, parallel, held)?,
            };
            known = Some((held, of));
            self.states.push(held.states);
            self.in_flight.push(of.in_flight);
            self.optimizer.push(of.optimizer);
            self.optimizer_transient.push(of.optimizer_transient);
            self.resident.push(of.resident);
            self.host.push(of.host);
            self.on_host.push(of.states_on_host + activations);
        }
        Ok(())
    }

    /// Bytes of saved activations that a rank keeps in host memory. Only jobs without a pipeline do, so all are of one stage.
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

/// What a stage consists of: the classes of its layers, how many of these are treated as the first of
/// [`plans::Recompute::of_first_and_others`], and whether it has the embedding and the head.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span<'a> {
    pub(crate) layers: &'a [u8],
    pub(crate) as_first: u64,
    pub(crate) ends: [bool; 2],
}

/// Share of the passes beside which no pass of another micro-batch runs, where forward passes alternate with backward
/// passes: of a pipeline rank all forward passes before its first backward pass, and as many backward passes after its last
/// forward pass. With `v` stages on each of `p` ranks these are `2·(p − 1 − r) + (v − 1)·p + 1` on rank `r`, the one more of
/// Megatron-Core's schedule included (`get_pp_rank_microbatches`), on average `v·p` of `v·m`.
pub(crate) fn passes_alone(d: &Decisions) -> f64 {
    (d.pp as f64 / d.num_micro_batches as f64).min(1.0)
}

impl Blocks {
    /// All of them, some twice.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<BlockCost>> {
        let ends = [&self.embedding, &self.head].into_iter().chain(&self.mtp);
        ends.chain(self.layers.iter().flatten())
    }

    /// By kind: embedding, head, prediction module, and for every class of layers the stage's last, then its first.
    pub(crate) fn of_kind(&self) -> Vec<Option<&Arc<BlockCost>>> {
        let ends = [Some(&self.embedding), Some(&self.head), self.mtp.as_ref()];
        let layers = self.layers.iter().flatten().map(Some);
        ends.into_iter().chain(layers).collect()
    }

    /// Whether a kind of block in [`Blocks::of_kind`] is the embedding or the head.
    pub(crate) fn is_end(kind: usize) -> bool {
        kind < 2
    }

    pub(crate) fn look_up(costs: &BlockCosts, strategy: &Decisions) -> Result<Self, CostError> {
        let execution = Execution::of(&costs.scenario().runtime, strategy);
        Self::executed(costs, strategy, execution)
    }

    /// The same with passes run in a given way.
    pub(crate) fn executed(
        costs: &BlockCosts,
        strategy: &Decisions,
        execution: Execution,
    ) -> Result<Self, CostError> {
        let predicts = costs.scenario().model.mtp_layers > 0;
        Self::by(costs, strategy, execution, predicts, |key| costs.block(key))
    }

    /// The same without the prediction module; blocks that are not known yet are priced for these decisions only.
    pub(crate) fn fewest(
        costs: &BlockCosts,
        d: &Decisions,
        execution: Execution,
    ) -> Result<Self, CostError> {
        Self::by(costs, d, execution, false, |key| costs.block_alone(key))
    }

    fn by(
        costs: &BlockCosts,
        strategy: &Decisions,
        execution: Execution,
        predicts: bool,
        cost: impl Fn(&BlockKey) -> Result<Arc<BlockCost>, CostError>,
    ) -> Result<Self, CostError> {
        let runtime = &costs.scenario().runtime;
        let alone = passes_alone(strategy);
        let block = |class: BlockClass, recompute: Recompute| {
            let key = BlockKey::of(costs.scenario(), strategy, class, recompute);
            let key = key.executed(runtime, execution);
            match key.alone() {
                None => costs.captured(&key, execution.graphs, || cost(&key)),
                Some(passes_alone) => {
                    let mean = cost(&key)?.mixed(&*cost(&passes_alone)?, alone);
                    Ok(Arc::new(mean.captured(execution.graphs)))
                }
            }
        };
        let [as_first, mode] = strategy.recompute.of_first_and_others();
        let layer = |&class: &LayerClass| {
            let as_asked = block(BlockClass::Layer(class), mode)?;
            let first = match as_first {
                same if same == mode => Arc::clone(&as_asked),
                other => block(BlockClass::Layer(class), other)?,
            };
            Ok([as_asked, first])
        };
        // Runtimes do not recompute the embedding or the head.
        Ok(Self {
            embedding: block(BlockClass::Embedding, Recompute::None)?,
            head: block(BlockClass::Head, Recompute::None)?,
            mtp: predicts.then(|| block(BlockClass::Mtp, mode)).transpose()?,
            layers: (costs.layer_classes().iter().map(layer)).collect::<Result<_, CostError>>()?,
        })
    }

    /// Time to send one micro-batch's activation to the next pipeline rank.
    pub(crate) fn transfer(
        &self,
        costs: &BlockCosts,
        strategy: &Decisions,
    ) -> Result<Seconds, CostError> {
        if strategy.pp == 1 {
            return Ok(Seconds(0.0));
        }
        costs
            .book()
            .transfer(costs.scenario(), strategy, self.output())
    }

    /// The shortest such time under any of these axis orders.
    pub(crate) fn least_transfer(
        &self,
        costs: &BlockCosts,
        d: &Decisions,
        orders: &[AxisOrder],
    ) -> Result<Seconds, CostError> {
        let mut least: Option<Seconds> = None;
        for &axis_order in orders {
            let d = Decisions {
                axis_order,
                ..d.clone()
            };
            let time = self.transfer(costs, &d)?;
            least = Some(least.map_or(time, |least| least.min(time)));
        }
        Ok(least.unwrap_or_default())
    }

    /// Bytes that a stage hands to the next.
    pub(crate) fn output(&self) -> Bytes {
        let layer = self.layers.first().map(|[asked, _]| asked.output);
        layer.unwrap_or(self.embedding.output)
    }

    fn runs(&self, costs: &BlockCosts, strategy: &Decisions, span: Span<'_>) -> Vec<Run> {
        let mut runs = Vec::with_capacity(4);
        if span.ends[0] {
            push(&mut runs, &self.embedding, 1, false);
        }
        for (offset, &class) in span.layers.iter().enumerate() {
            let [asked, first] = &self.layers[usize::from(class)];
            let as_first = (offset as u64) < span.as_first;
            let on_host = (offset as u64) < strategy.offload_layers;
            push(&mut runs, if as_first { first } else { asked }, 1, on_host);
        }
        if span.ends[1] {
            if let Some(mtp) = &self.mtp {
                push(&mut runs, mtp, costs.scenario().model.mtp_layers, false);
            }
            push(&mut runs, &self.head, 1, false);
        }
        runs
    }
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
        runs: Vec<Run>,
    ) -> Result<Self, CostError> {
        let Traffic {
            scenario,
            strategy,
            parallel,
            ..
        } = *traffic;
        let mut work = StageWork::default();
        for run in &runs {
            let count = run.count as f64;
            work.forward += run.cost.forward * count;
            work.backward += run.cost.backward * count;
            work.recompute += run.cost.recompute * count;
            work.saved += kept(run);
            work.saved_for_weight += run.cost.memory.saved_for_weight * run.count;
        }
        let keeps_output = (scenario.runtime.rewrites).contains(&Rewrite::KeepStageOutput);
        if strategy.pp > 1 && keeps_output {
            work.saved += runs.last().map_or(Bytes(0), |run| run.cost.output);
        }
        transients(&mut work, &runs);
        if strategy.overlap.expert_parallel && strategy.ep > 1 {
            // While a layer runs backward, that of another micro-batch runs forward.
            let is_layer = |run: &&Run| matches!(run.cost.key.class, BlockClass::Layer(_));
            let forward =
                |run: &Run| run.cost.memory.saved_bytes + run.cost.memory.transient_forward;
            let held = runs.iter().filter(is_layer).map(forward).max();
            work.transient_backward += held.unwrap_or_default();
        }
        graphed::hold(scenario, strategy, &runs, &mut work);
        costs.book().data_parallel(traffic, &runs, &mut work)?;
        let weights = weights(costs, strategy, &runs);
        let mut states = offload::states_on_device(scenario, strategy, &parallel.sharding, weights);
        let tables = runs
            .iter()
            .filter(|run| run.cost.key.class == BlockClass::Embedding);
        for table in tables {
            let updated = parallel.sharding.updated(table.cost.weights.trained);
            states.moments += Bytes(
                strategy
                    .state_types(&scenario.runtime, scenario.workload.precision)
                    .wider_moments(updated),
            );
        }
        let tensors = |run: &Run| run.cost.tensors.reduced * run.count;
        Ok(Self {
            largest: largest(costs, strategy, &runs),
            tensors: runs.iter().map(tensors).sum(),
            runs,
            work,
            weights,
            states,
        })
    }
}

/// Sizes of the largest blocks of a virtual stage, on one rank.
fn largest(costs: &BlockCosts, strategy: &Decisions, runs: &[Run]) -> Largest {
    let mut largest = Largest::default();
    for run in runs {
        let is_end = matches!(run.cost.key.class, BlockClass::Embedding | BlockClass::Head);
        largest = largest.or(run.cost.weights, is_end);
    }
    largest.share(twice(costs, strategy));
    largest
}

/// Number of weights to subtract from the sum over a virtual stage's blocks: with tied embeddings, a stage that has both the
/// embedding and the head has one table for the two.
fn twice(costs: &BlockCosts, strategy: &Decisions) -> u64 {
    let model = &costs.scenario().model;
    match model.tied_embeddings && strategy.stages.0.len() == 1 {
        true => dtensor::placement::chunk_size(model.vocab, strategy.tp) * model.hidden,
        false => 0,
    }
}

/// Numbers of weights of a virtual stage that one rank holds.
fn weights(costs: &BlockCosts, strategy: &Decisions, runs: &[Run]) -> Weights {
    let mut weights = Weights::default();
    for run in runs {
        weights += run.cost.weights * run.count;
    }
    weights.share(twice(costs, strategy));
    weights
}

/// Bytes that a row of blocks keeps on the device from forward to backward.
fn kept(run: &Run) -> Bytes {
    match run.on_host {
        true => Bytes(0),
        false => run.cost.memory.saved_bytes * run.count,
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
fn transients(stage: &mut StageWork, runs: &[Run]) {
    // While layers run, that on its way to host memory or back is held too.
    let window = window(runs);
    let beside = |run: &Run| match run.cost.key.class {
        BlockClass::Layer(_) => window,
        _ => Bytes(0),
    };
    let mut held = Bytes(0);
    let mut peak = Bytes(0);
    for run in runs {
        held += kept(run);
        peak = peak.max(held + beside(run) + run.cost.memory.transient_forward);
    }
    stage.transient_forward = peak.saturating_sub(stage.saved);
    let mut released = Bytes(0);
    let mut peak = Bytes(0);
    for run in runs.iter().rev() {
        let own = beside(run) + run.cost.memory.transient_backward;
        peak = peak.max(own.saturating_sub(released));
        released += kept(run);
    }
    stage.transient_backward = peak;
}
