//! The cost of one block, and the key under which it is remembered.

use catalog::{Axis, Bytes, DType};
use dtensor::Trace;
use models::{BlockClass, BlockLayout};
use plans::{Decisions, Group, NamedTime, Recompute};

use crate::Scenario;
use crate::lower::BlockMemory;
use crate::spread::Spread;
use crate::states::{self, Weights};
use crate::work::{Backward, Work};

/// DeepSpeed's ZeRO-3 keeps tensors of fewer elements whole on every rank (`stage3_param_persistence_threshold`).
const PERSISTENT: u64 = 100_000;

/// Numbers of a block's parameter tensors, for a ZeRO-3 that gathers tensor by tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Number of tensors that are gathered: those large enough to be sharded.
    pub gathered: u64,
    /// Number of trained tensors; the gradient of each is reduced.
    pub reduced: u64,
}

impl Tensors {
    /// Counts the tensors of a traced block.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let large = |elements: u64| elements >= PERSISTENT;
        let all = || trace.parameters.iter();
        Self {
            gathered: all().filter(|p| large(p.local_elements)).count() as u64,
            reduced: all().filter(|p| p.trained).count() as u64,
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
    /// How the runtime issues its kernels and messages.
    pub issue: Issue,
    /// Element type of the buffer that gradients of weights are added up in.
    pub accumulates: DType,
    /// Size and placement of the groups that communicate in the block.
    pub groups: BlockGroups,
}

/// How a runtime issues the kernels and messages of a block: what a strategy decides of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Issue {
    /// Whether products are split to overlap with tensor-parallel collectives.
    pub overlap_tp: bool,
}

impl Issue {
    /// What a strategy decides.
    #[must_use]
    pub fn of(strategy: &Decisions) -> Self {
        Self {
            overlap_tp: strategy.overlap.tensor_parallel,
        }
    }
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
    /// How the time of all these passes together differs between micro-batches.
    pub spread: Spread,
    /// Memory that the block keeps for backward, and what its passes need beside that.
    pub memory: BlockMemory,
    /// Bytes of the tensor handed to the next block.
    pub output: Bytes,
    /// Parameters that a rank holds of this block, before ZeRO shards them.
    pub weights: Weights,
    /// Number of the block's parameter tensors.
    pub tensors: Tensors,
}

/// The parts of a block's cost by name, which only reports need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockDetail {
    /// Time of every kernel and collective.
    pub kernels: Vec<NamedTime>,
    /// Bytes of every tensor kept for backward.
    pub saved: Vec<(String, Bytes)>,
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

impl BlockKey {
    /// The key of a block's cost under a strategy.
    #[must_use]
    pub fn of(
        scenario: &Scenario,
        strategy: &Decisions,
        class: BlockClass,
        recompute: Recompute,
    ) -> Self {
        let workload = &scenario.workload;
        let experts = matches!(class, BlockClass::Layer(c) if c.moe)
            || (class == BlockClass::Mtp && scenario.model.moe.is_some());
        let layout = BlockLayout {
            ep: if experts { strategy.ep } else { 1 },
            etp: if experts { strategy.etp } else { 1 },
            ..BlockLayout::of(strategy, workload.seq_len, workload.precision)
        };
        let groups = BlockGroups {
            tp: strategy.group(Axis::Tp),
            cp: strategy.group(Axis::Cp),
            ep: if experts {
                strategy.group(Axis::Ep)
            } else {
                strategy.group(Axis::Tp)
            },
            etp: if experts {
                strategy.group(Axis::Etp)
            } else {
                strategy.group(Axis::Tp)
            },
        };
        let mut key = Self {
            class,
            layout,
            recompute,
            issue: Issue::of(strategy),
            accumulates: states::accumulation_type(&scenario.runtime, strategy, workload.precision),
            groups,
        };
        key.issue.overlap_tp &= layout.tp > 1 && key.is_split_to_overlap();
        key
    }

    /// Whether products are split where tensor-parallel messages overlap: those of layers are, not those of the head.
    fn is_split_to_overlap(&self) -> bool {
        matches!(self.class, BlockClass::Layer(_) | BlockClass::Mtp)
    }

    /// Whether tensor-parallel messages of the block may be told to overlap.
    pub(crate) fn may_overlap(&self) -> bool {
        self.layout.sequence_parallel && self.is_split_to_overlap()
    }
}
