//! Data-parallel traffic of a stage: the gathers and reductions of every block, and the actions they overlap with.

use catalog::prefetch::Ahead;
use catalog::runtime::{BUCKET_ELEMENTS, Rewrite};
use catalog::state_types::StateTypes;
use catalog::{Bytes, Seconds, Zero};
use dtensor::CollectiveKind;
use models::BlockClass;
use plans::Decisions;

use crate::activation_copies::ActivationCopies;
use crate::messages::Message;
use crate::offload::{self, Copies, GradientCopies, Offloaded};
use crate::shared_tables::SharedTables;
use crate::stage::{Awaited, LayerTraffic, Run, StageWork, TrafficPlan, When};
use crate::states::{Elements, Weights};
use crate::traffic::{Buckets, DataParallel};
use crate::work::Work;
use crate::{CostError, Scenario, states};

/// Prices the data-parallel messages and host copies of a strategy's blocks. Blocks with equally many weights share one price,
/// which is computed when the first of them is met.
#[derive(Debug)]
pub(crate) struct Traffic<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) strategy: &'a Decisions,
    pub(crate) parallel: &'a DataParallel,
    types: StateTypes,
    /// Whether the blocks to price are those of a stage; without, they are of any stage, and prices are lower bounds.
    of_stage: bool,
    priced: Vec<(PriceKey, BlockTraffic)>,
}

/// What the price of a block's messages depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PriceKey {
    weights: Weights,
    is_layer: bool,
    buckets: Buckets,
}

/// Parameters that a bucket of Megatron-LM's data-parallel messages has at least for each of their ranks, unless it is told a size
/// (`max(40000000, 1000000 * dp)`, NVIDIA/Megatron-LM@d98e8a6, `distributed_data_parallel.py`).
const BUCKET_OF_A_RANK: u64 = 1_000_000;

/// More elements than the buckets of any stage have.
const MANY_ELEMENTS: Elements = Elements {
    dense: 1 << 40,
    expert: 1 << 40,
};

/// How long the gather, the reduction and the host copies of one block take.
#[derive(Clone, Copy, Debug)]
struct BlockTraffic {
    gather: Seconds,
    reduce: Seconds,
    copies: Copies,
}

impl<'a> Traffic<'a> {
    /// The traffic of a strategy, with nothing priced yet.
    pub(crate) fn new(
        scenario: &'a Scenario,
        strategy: &'a Decisions,
        parallel: &'a DataParallel,
    ) -> Self {
        Self {
            scenario,
            strategy,
            parallel,
            types: strategy.state_types(&scenario.runtime, scenario.workload.precision),
            of_stage: true,
            priced: Vec::with_capacity(4),
        }
    }

    /// The traffic of blocks whose stage is not known. No stage's blocks take less time.
    pub(crate) fn of_any_stage(self) -> Self {
        Self {
            of_stage: false,
            ..self
        }
    }

    /// What the messages of a stage of these blocks hold.
    ///
    /// Megatron-LM sends all of a stage at once if its messages do not overlap with passes, or if the stage is not the first of the
    /// model; else in buckets of at least 40 million elements, and of a million for each data-parallel rank (NVIDIA/Megatron-LM@d98e8a6,
    /// `distributed_data_parallel.py`, `DistributedDataParallel.__init__`).
    fn buckets(&self, runs: &[Run], tables: &SharedTables) -> Buckets {
        let runtime = &self.scenario.runtime;
        let d = self.strategy;
        if runtime.works_by_block(d.zero) && !states::is_deepspeed(runtime) {
            return Buckets::Blocks;
        }
        let of = |elements| Elements {
            dense: elements,
            expert: elements,
        };
        let overlaps = d.overlap.grad_reduce || self.parallel.ranks() == 1;
        let by_stage = runtime.rewrites.contains(&Rewrite::WholeStageBuckets);
        if !by_stage && (overlaps || !states::keeps_gradient_buffers(runtime)) {
            return Buckets::Of(of(BUCKET_ELEMENTS));
        }
        let in_parts = by_stage && overlaps;
        let part = BUCKET_ELEMENTS.max(BUCKET_OF_A_RANK * self.parallel.ranks());
        let mut stage = match self.of_stage {
            true => Elements::default(),
            false => MANY_ELEMENTS,
        };
        for run in runs {
            stage += tables.own(run).trained * run.count;
        }
        let is_first = d.pp == 1 || self.of_stage && runs.iter().any(is_embedding);
        match in_parts && is_first {
            true => Buckets::Of(Elements {
                dense: part.min(stage.dense),
                expert: part.min(stage.expert),
            }),
            false => Buckets::Of(stage),
        }
    }

    /// The times of a block's messages.
    fn of(&mut self, key: PriceKey, message: Message<'_>) -> Result<BlockTraffic, CostError> {
        if let Some((_, known)) = self.priced.iter().find(|(of, _)| *of == key) {
            return Ok(*known);
        }
        let new = self.price(key, message)?;
        self.priced.push((key, new));
        Ok(new)
    }

    fn price(&self, key: PriceKey, message: Message<'_>) -> Result<BlockTraffic, CostError> {
        let PriceKey {
            weights,
            is_layer,
            buckets,
        } = key;
        let Self {
            scenario,
            strategy,
            parallel,
            types,
            ..
        } = self;
        let reduced = states::reduced_type(&scenario.runtime, types, strategy.zero);
        let whole = states::all_reduces_for_shards(&scenario.runtime, strategy.zero);
        let sum = match strategy.zero == Zero::Z0 || whole {
            true => CollectiveKind::AllReduce,
            false => CollectiveKind::ReduceScatter,
        };
        Ok(BlockTraffic {
            gather: match strategy.zero {
                Zero::Z0 => Seconds(0.0),
                zero => {
                    let elements = weights.gathered(zero);
                    let precision = scenario.workload.precision;
                    let gathered = match zero {
                        Zero::Z3 if is_layer => {
                            states::gathered_layer_type(&scenario.runtime, precision)
                        }
                        Zero::Z3 => states::gathered_type(&scenario.runtime, precision),
                        _ => precision.activation(),
                    };
                    parallel.gather(elements, message, gathered, buckets)?
                }
            },
            reduce: parallel.reduce(weights.trained, message, reduced, sum, buckets)?,
            copies: match Offloaded::of(scenario, strategy) {
                Some(host) => host.copies(scenario, &parallel.sharding, weights)?,
                None => Copies::default(),
            },
        })
    }
}

/// Adds the gathers and reductions of a stage's blocks, and copies of its saved activations.
///
/// # Errors
/// When a message was not measured.
pub(crate) fn add_layers(
    traffic: &mut Traffic<'_>,
    message: Message<'_>,
    runs: &[Run],
    stage: &mut StageWork,
) -> Result<(), CostError> {
    let forward = stage.forward.duration().0;
    let backward = (stage.recompute + stage.backward.whole).duration().0;
    let tables = SharedTables::of(traffic.scenario, traffic.strategy, runs);
    // The head, and usually the embedding, belong to a module of FSDP that is freed only after backward (PyTorch, `_fsdp_state.py`,
    // `_lazy_init`).
    let is_fsdp = states::is_fsdp(&traffic.scenario.runtime);
    let frees_embedding = states::frees_embedding(traffic.scenario);
    let [gathers, reductions] =
        (traffic.parallel.uses_cards(traffic.scenario.domain())).map(f64::from);
    let buckets = traffic.buckets(runs, &tables);
    let mut layers = 0;
    stage.layers.reserve(runs.len());
    for run in runs {
        let is_layer = matches!(run.cost.key.class, BlockClass::Layer(_));
        let is_freed = match run.cost.key.class {
            BlockClass::Layer(_) | BlockClass::Mtp => true,
            BlockClass::Embedding => frees_embedding,
            BlockClass::Head => false,
        };
        let first_layer = is_layer.then_some(layers);
        layers += if is_layer { run.count } else { 0 };
        let weights = tables.own(run);
        let key = PriceKey {
            weights,
            is_layer,
            buckets,
        };
        let block = traffic.of(key, message)?;
        stage.layers.push(LayerTraffic {
            count: run.count,
            first_layer,
            forward_share: share(run.cost.forward, forward),
            backward_share: share(run.cost.recompute + run.cost.backward.whole, backward),
            gather: block.gather,
            stays_gathered: is_fsdp && !is_freed,
            reduce: block.reduce,
            copies: block.copies,
            forward_card: run.cost.forward.card * gathers,
            backward_card: (run.cost.recompute.card + run.cost.backward.whole.card) * reductions,
        });
    }
    let saved = runs.iter().filter(|run| run.on_host);
    let saved = saved.map(|run| run.cost.memory.saved_bytes).max();
    if let Some(bytes) = saved {
        stage.activations = ActivationCopies {
            layers,
            copied: traffic.strategy.offload_layers,
            time: offload::copy(traffic.scenario, bytes)?,
        };
    }
    Ok(())
}

/// Adds the extra time to broadcast `parameters` from one rank after the other instead of gathering them: one start for every rank,
/// but the first, that owns any of `tensors` whole parameters.
///
/// # Errors
/// When a message was not measured.
pub(crate) fn broadcast(
    parallel: &DataParallel,
    tensors: u64,
    parameters: Bytes,
    message: Message<'_>,
    stage: &mut StageWork,
) -> Result<(), CostError> {
    if let Some(gather) = &mut stage.exposed_gather {
        let (ranks, _) = parallel.shared_by();
        let senders = ranks.min(tensors);
        let of_each = Bytes(parameters.0 / senders.max(1));
        let start = parallel.start(CollectiveKind::AllGather, of_each, message)?;
        *gather += start * senders.saturating_sub(1) as f64;
    }
    Ok(())
}

/// What a stage of a pipeline does with all its parameters, or all its gradients, together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Together {
    awaited: Awaited,
    /// Whether gradients are reduced when the stage's last backward pass has ended.
    pub(crate) reduces_at_end: bool,
}

impl Together {
    /// Of the first stage of the model, if `is_first`, or of a later one.
    ///
    /// - Megatron-LM with one stage on each rank: later stages have one bucket. With several, all stages reduce their gradients after their
    ///   last backward pass (`align_grad_reduce`), and buckets are gathered from the step's start on, those of the last layers first
    ///   (`align_param_gather`; NVIDIA/Megatron-LM@d98e8a6, `pipeline_parallel/schedules.py`, `grad_sync_func` and `param_sync_func`).
    /// - FSDP under PyTorch's pipelines with several stages on each rank: `UNSHARD` gathers a stage ahead of its first pass, which waits for
    ///   all of it (pytorch/pytorch@00722e6, `distributed/pipelining/schedules.py`, `_assert_unsharded`).
    pub(crate) fn of(scenario: &Scenario, strategy: &Decisions, is_first: bool) -> Self {
        let runtime = &scenario.runtime;
        let several = strategy.stages.0.len() as u64 > strategy.pp;
        if runtime.rewrites.contains(&Rewrite::WholeStageBuckets) {
            let awaited = match (several, is_first) {
                (true, true) => Awaited::AllOfStep,
                (false, false) => Awaited::AllOfPass,
                (true, false) | (false, true) => Awaited::Own,
            };
            return Self {
                awaited,
                reduces_at_end: several || !is_first,
            };
        }
        let gathers_once = !strategy.reshard_after_forward;
        match several && gathers_once && states::leaves_backward_alone(runtime, strategy) {
            true => Self {
                awaited: Awaited::AllOfStep,
                reduces_at_end: false,
            },
            false => Self::default(),
        }
    }
}

/// Decides which actions overlap with the traffic of a stage of these blocks; what nothing hides becomes an action of its own.
pub(crate) fn plan(traffic: &Traffic<'_>, runs: &[Run], stage: &mut StageWork) {
    let (scenario, strategy) = (traffic.scenario, traffic.strategy);
    let all = |time: fn(&LayerTraffic) -> Seconds| -> Seconds {
        let layers = stage.layers.iter();
        layers.map(|l| time(l) * l.count as f64).sum()
    };
    let gathers = all(|l| l.gather);
    let reduces = all(|l| l.reduce);
    let copied = stage
        .layers
        .iter()
        .map(|l| l.copies.to_host * l.count as f64);
    let copied = copied.fold(GradientCopies::default(), |sum, of| sum + of);
    let mut overlap = strategy.overlap;
    let reduces_last = &scenario.runtime.space.reduces_last;
    overlap.grad_reduce &= !reduces_last.contains(strategy.zero, strategy.pp);
    // With one data-parallel rank the strategy does not decide this: gradients are copied to the
    // host as they come, and replicas of experts, if there are any, send beside other work.
    let alone = traffic.parallel.ranks() == 1;
    overlap.grad_reduce |= alone;
    let has = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
    overlap.param_gather = (overlap.param_gather || alone) && !has(Rewrite::GatherInStep);
    let offloaded = Offloaded::of(scenario, strategy);
    let on_same_stream = offloaded.is_some_and(Offloaded::copies_on_reducing_stream);
    let together = Together::of(scenario, strategy, runs.iter().any(is_embedding));
    let mut plan = TrafficPlan {
        first: 0,
        last: strategy.num_micro_batches as u32 - 1,
        awaited: together.awaited,
        reduces_at_end: together.reduces_at_end,
        ahead: (scenario.runtime.ahead(strategy.prefetch)).unwrap_or(Ahead::USUAL),
        accumulation_waits: offloaded.is_some_and(Offloaded::accumulation_waits),
        copies_hold_kernels: on_same_stream && !strategy.overlap.grad_reduce,
        reductions_hold_kernels: has(Rewrite::WaitForReductions),
        ..TrafficPlan::default()
    };
    when_gathered(
        (scenario, strategy),
        overlap.param_gather,
        gathers,
        (stage, &mut plan),
    );
    let runtime = &scenario.runtime;
    let by_block = runtime.works_by_block(strategy.zero);
    match strategy.zero {
        _ if states::leaves_backward_alone(runtime, strategy) => {
            plan.exposed_reductions = When::Last;
            stage.exposed_reduce = Some(reduces);
            stage.copied_after_reduce = copied;
        }
        // Only runtimes on PyTorch's FSDP reduce once, and these have no switch for the overlap.
        _ if states::reduces_once(runtime, strategy) => {
            plan.reduce = When::Last;
        }
        Zero::Z0 | Zero::Z1 if overlap.grad_reduce && !by_block => plan.reduce = When::Last,
        _ if overlap.grad_reduce => plan.reduce = When::Always,
        Zero::Z0 | Zero::Z1 | Zero::Z2 | Zero::Z3 => {
            stage.exposed_reduce = Some(reduces);
            stage.copied_after_reduce = copied;
        }
    }
    stage.traffic = plan;
}

/// Decides when parameters are gathered, which takes `time` if nothing hides it.
fn when_gathered(
    (scenario, strategy): (&Scenario, &Decisions),
    overlaps: bool,
    time: Seconds,
    (stage, plan): (&mut StageWork, &mut TrafficPlan),
) {
    match strategy.zero {
        Zero::Z0 => {}
        Zero::Z1 | Zero::Z2 if overlaps => plan.gather_forward = When::First,
        Zero::Z1 | Zero::Z2 => stage.exposed_gather = Some(time),
        Zero::Z3 if strategy.reshard_after_forward => {
            plan.gather_forward = When::Always;
            plan.gather_backward = When::Always;
        }
        Zero::Z3 if scenario.runtime.zero3_once.gather.contains(strategy.pp) => {
            plan.gather_forward = When::First;
        }
        Zero::Z3 => plan.gather_forward = When::Always,
    }
}

fn is_embedding(run: &Run) -> bool {
    run.cost.key.class == BlockClass::Embedding
}

fn share(part: Work, whole: f64) -> f64 {
    if whole > 0.0 {
        part.duration().0.min(whole) / whole
    } else {
        0.0
    }
}
