//! The cost of one block, and the key under which it is remembered.

use catalog::dispatcher::RoutedTokens;
use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes, CpKind, CudaGraphs, DType, Runtime, Seconds};
use dtensor::Trace;
use models::{BlockClass, BlockLayout};
use plans::{Decisions, Group, NamedTime, Recompute};

use crate::Scenario;
use crate::execution::Execution;
use crate::lower::BlockMemory;
use crate::spread::Spread;
use crate::states::{self, Weights};
use crate::work::{Backward, Work};

/// DeepSpeed's ZeRO-3 keeps tensors of fewer elements whole on every rank (`stage3_param_persistence_threshold`).
const PERSISTENT: u64 = 100_000;

/// Numbers of a block's parameter tensors, for systems that gather, reduce or read them one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Number of tensors that are gathered: those large enough to be sharded.
    pub gathered: u64,
    /// Number of trained tensors; the gradient of each is reduced.
    pub reduced: u64,
    /// Elements of the largest trained tensor.
    pub largest: u64,
}

impl Tensors {
    /// Counts the tensors of a traced block.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let large = |elements: u64| elements >= PERSISTENT;
        let all = || trace.parameters.iter();
        let trained = all().filter(|p| p.trained).map(|p| p.local_elements);
        Self {
            gathered: all().filter(|p| large(p.local_elements)).count() as u64,
            reduced: all().filter(|p| p.trained).count() as u64,
            largest: trained.max().unwrap_or_default(),
        }
    }
}

/// Everything that a block's cost depends on: the key of the cache of block costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// The kind of block: embedding, a class of decoder layers, head, or multi-token prediction.
    pub class: BlockClass,
    /// Sizes that decide the block's local shapes.
    pub layout: BlockLayout,
    /// What backward recomputes.
    pub recompute: Recompute,
    /// Which messages overlap with compute, what carries tokens to experts, and what CUDA graphs capture.
    pub execution: Execution,
    /// Element type of the buffer in which weight gradients are accumulated.
    pub accumulates: DType,
    /// Size and placement of the groups that communicate in the block.
    pub groups: BlockGroups,
}

/// Groups of the mesh axes that communicate inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockGroups {
    /// Tensor-parallel group.
    pub tp: Group,
    /// Context-parallel group.
    pub cp: Group,
    /// Expert-parallel group.
    pub ep: Group,
    /// Tensor-parallel group inside experts.
    pub etp: Group,
}

/// Time and memory of a block for one micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockCost {
    /// The block, its layout and what it recomputes.
    pub key: BlockKey,
    /// Time of the forward pass.
    pub forward: Work,
    /// Time of the backward pass, without recomputation.
    pub backward: Backward,
    /// Time of the forward kernels that run again before backward.
    pub recompute: Work,
    /// How much the total time of these passes varies between micro-batches.
    pub spread: Spread,
    /// Host time to issue passes if CUDA graphs capture all kernels but experts' and messages.
    pub graphed: HostTimes,
    /// Memory that the block keeps for backward, and what its passes need in addition while they
    /// run.
    pub memory: BlockMemory,
    /// Bytes of the tensor handed to the next block.
    pub output: Bytes,
    /// Parameters that a rank holds of this block, before ZeRO shards them.
    pub weights: Weights,
    /// Number of the block's parameter tensors.
    pub tensors: Tensors,
}

/// Time that the host takes to issue the passes of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostTimes {
    /// Host time of the forward pass.
    pub forward: Seconds,
    /// Host time of the backward pass, if it is not split.
    pub backward: Seconds,
    /// The half of backward that computes gradients of inputs.
    pub input: Seconds,
    /// The half that computes gradients of weights.
    pub weight: Seconds,
    /// Forward kernels that run again before backward.
    pub recompute: Seconds,
    /// Time for which the device idles in forward after the host has waited for it ([`Work::starved`]).
    pub starved_forward: Seconds,
    /// Time for which the device idles in the same way where forward kernels run again.
    pub starved_recompute: Seconds,
}

/// The parts of a block's cost by name, which only reports need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockDetail {
    /// Time of every kernel and collective.
    pub kernels: Vec<NamedTime>,
    /// Bytes of every tensor kept for backward.
    pub saved: Vec<(String, Bytes)>,
}

impl BlockCost {
    /// The mean cost if a `share` of the passes costs `other`, and the rest `self`.
    pub(crate) fn mixed(&self, other: &Self, share: f64) -> Self {
        let (own, theirs) = (1.0 - share, share);
        let mut backward = self.backward * own;
        backward += other.backward * theirs;
        Self {
            forward: self.forward * own + other.forward * theirs,
            backward,
            recompute: self.recompute * own + other.recompute * theirs,
            graphed: self.graphed.mixed(&other.graphed, [own, theirs]),
            ..self.clone()
        }
    }

    /// The same cost for another type of gradients, which changes backward only.
    pub(crate) fn with_gradients(&self, accumulates: DType, backward: Backward) -> Self {
        Self {
            key: BlockKey {
                accumulates,
                ..self.key
            },
            backward,
            ..self.clone()
        }
    }

    /// Whether the device waits for the host in some pass.
    pub(crate) fn waits_for_host(&self) -> bool {
        let Backward {
            whole,
            input,
            weight,
        } = self.backward;
        let passes = [self.forward, self.recompute, whole, input, weight];
        passes.iter().any(|pass| pass.host_wait().0 > 0.0)
    }

    /// The cost if CUDA graphs capture this part of a step: only the host's times differ.
    pub(crate) fn captured(&self, graphs: CudaGraphs) -> Self {
        let hosts = match graphs {
            CudaGraphs::None => return self.clone(),
            CudaGraphs::Layers => self.graphed,
            CudaGraphs::Step => HostTimes::default(),
        };
        let mut cost = self.clone();
        cost.forward.host = hosts.forward;
        cost.backward.whole.host = hosts.backward;
        cost.backward.input.host = hosts.input;
        cost.backward.weight.host = hosts.weight;
        cost.recompute.host = hosts.recompute;
        cost.forward.starved = hosts.starved_forward;
        cost.recompute.starved = hosts.starved_recompute;
        cost
    }
}

impl HostTimes {
    /// The mean of the times with these weights, if only the device's idle times differ: the host issues the same kernels.
    fn mixed(&self, other: &Self, [own, theirs]: [f64; 2]) -> Self {
        Self {
            starved_forward: self.starved_forward * own + other.starved_forward * theirs,
            starved_recompute: self.starved_recompute * own + other.starved_recompute * theirs,
            ..*self
        }
    }
}

impl BlockDetail {
    /// The weighted mean of two details of a block: `other` weighs `share`, this one the rest.
    pub(crate) fn mixed(mut self, other: Self, share: f64) -> Self {
        let own = self.kernels.iter_mut().map(|kernel| (kernel, 1.0 - share));
        let mut others = other.kernels;
        let theirs = others.iter_mut().map(|kernel| (kernel, share));
        for (kernel, weight) in own.chain(theirs) {
            kernel.seconds *= weight;
        }
        self.kernels.extend(others);
        self
    }
}

/// Counts the parameters that a rank holds of a traced block, before ZeRO shards them.
pub(crate) fn weights(trace: &Trace) -> Weights {
    let mut weights = Weights::default();
    for parameter in &trace.parameters {
        let elements = match parameter.trained {
            true => &mut weights.trained,
            false => &mut weights.frozen,
        };
        if parameter.expert {
            elements.expert += parameter.local_elements;
        } else {
            elements.dense += parameter.local_elements;
        }
    }
    weights
}

/// How a strategy divides a block among ranks, apart from its experts, which are taken as undivided.
pub(crate) fn layout(scenario: &Scenario, strategy: &Decisions, class: BlockClass) -> BlockLayout {
    let workload = &scenario.workload;
    let layout = BlockLayout::of(strategy, workload.seq_len, workload.precision);
    let rewrites = &scenario.runtime.rewrites;
    let whole = rewrites.contains(&Rewrite::WholeVocabulary);
    match class {
        // PyTorch attends to one rank's keys at a time, also where one gather brings them all.
        BlockClass::Layer(_) | BlockClass::Mtp
            if strategy.cp_kind == CpKind::AllGather
                && rewrites.contains(&Rewrite::RingInPytorch) =>
        {
            BlockLayout {
                cp_kind: CpKind::Ring,
                ..layout
            }
        }
        BlockClass::Layer(_) | BlockClass::Mtp => layout,
        // These have no attention, so the kind of context parallelism does not change their cost.
        BlockClass::Embedding | BlockClass::Head => BlockLayout {
            cp_kind: CpKind::Ring,
            tp: match whole && !strategy.sequence_parallel {
                true => 1,
                false => layout.tp,
            },
            ..layout
        },
    }
}

impl BlockGroups {
    /// The groups of a strategy.
    pub(crate) fn of(d: &Decisions) -> Self {
        Self {
            tp: d.group(Axis::Tp),
            cp: d.group(Axis::Cp),
            ep: d.group(Axis::Ep),
            etp: d.group(Axis::Etp),
        }
    }
}

impl BlockKey {
    /// The key of a block's cost under a strategy.
    #[must_use]
    pub fn of(
        scenario: &Scenario,
        strategy: &Decisions,
        class: BlockClass,
        recompute: Recompute,
    ) -> Self {
        let experts = matches!(class, BlockClass::Layer(c) if c.moe)
            || (class == BlockClass::Mtp && scenario.model.moe.is_some());
        let routed = scenario.runtime.routed_tokens;
        let gathers = experts && strategy.tp > 1 && routed.are_gathered(strategy.ep);
        let layout = BlockLayout {
            ep: if experts { strategy.ep } else { 1 },
            etp: if experts { strategy.etp } else { 1 },
            routed_tokens: if gathers { routed } else { RoutedTokens::Own },
            ..layout(scenario, strategy, class)
        };
        let all = BlockGroups::of(strategy);
        let groups = match experts {
            true => all,
            false => BlockGroups {
                ep: all.tp,
                etp: all.tp,
                ..all
            },
        };
        let key = Self {
            class,
            layout,
            recompute,
            execution: Execution::of(scenario, strategy),
            accumulates: states::accumulation_type(
                &scenario.runtime,
                strategy,
                scenario.workload.precision,
            ),
            groups,
        };
        key.executed(&scenario.runtime, key.execution)
    }

    /// The key of the same block run in another way; settings that do not concern it are reset.
    #[must_use]
    pub(crate) fn executed(self, runtime: &Runtime, execution: Execution) -> Self {
        let own = Execution::own(runtime);
        let of_experts = if self.layout.ep > 1 { execution } else { own };
        let of_eight_bits = if self.layout.eight_bits {
            execution
        } else {
            own
        };
        Self {
            execution: Execution {
                overlap_tp: execution.overlap_tp && self.layout.tp > 1 && self.splits_products(),
                beside_others: of_experts.beside_others,
                dispatcher: of_experts.dispatcher,
                graphs: CudaGraphs::None,
                fp8_recipe: of_eight_bits.fp8_recipe,
                narrow_parameters: execution.narrow_parameters,
                wide_adapters: execution.wide_adapters,
            },
            ..self
        }
    }

    /// The key if no other micro-batch's pass runs beside this one; `None` if that changes nothing.
    pub(crate) fn alone(self) -> Option<Self> {
        let beside = self.execution.beside_others && self.layout.ep > 1;
        let mut alone = self;
        alone.execution.beside_others = false;
        beside.then_some(alone)
    }

    /// Whether GEMMs are split beside tensor-parallel messages: not those of embedding and head.
    pub(crate) fn splits_products(&self) -> bool {
        matches!(self.class, BlockClass::Layer(_) | BlockClass::Mtp)
    }
}
