//! What a block costs, and what that depends on.

use catalog::{Axis, Bytes};
use dtensor::Trace;
use models::{BlockClass, BlockLayout};
use plans::{Group, NamedTime, Recompute, Strategy};

use crate::Scenario;
use crate::lower::BlockMemory;
use crate::states::Elements;
use crate::work::{Backward, Work};

/// Tensors of fewer elements stay on every rank: `stage3_param_persistence_threshold`.
const PERSISTENT: u64 = 100_000;

/// Parameter tensors of a block, as ZeRO-3 that gathers tensor by tensor counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Those that are gathered.
    pub gathered: u64,
    /// All: every gradient is reduced.
    pub all: u64,
}

impl Tensors {
    /// The tensors of a traced block.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let large = |elements: u64| elements >= PERSISTENT;
        let sizes = || trace.parameters.iter().map(|p| p.local_elements);
        Self {
            gathered: sizes().filter(|&elements| large(elements)).count() as u64,
            all: sizes().count() as u64,
        }
    }
}

/// What a block's cost depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// Which block.
    pub class: BlockClass,
    /// Local shapes.
    pub layout: BlockLayout,
    /// What is run again.
    pub recompute: Recompute,
    /// Whether tensor-parallel collectives run beside products.
    pub overlap_tp: bool,
    /// Where the groups lie.
    pub groups: BlockGroups,
}

/// Groups of the axes that communicate inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockGroups {
    /// Tensor parallel.
    pub tp: Group,
    /// Context parallel.
    pub cp: Group,
    /// Expert parallel.
    pub ep: Group,
    /// Expert tensor parallel.
    pub etp: Group,
}

/// Time and memory of a block for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockCost {
    /// Forward.
    pub forward: Work,
    /// Backward.
    pub backward: Backward,
    /// Forward kernels run again.
    pub recompute: Work,
    /// What it keeps and needs.
    pub memory: BlockMemory,
    /// Bytes of the tensor handed to the next block.
    pub output: Bytes,
    /// Parameters this rank holds before ZeRO.
    pub elements: Elements,
    /// The tensors they are in.
    pub tensors: Tensors,
    /// Kernels and collectives by name.
    pub kernels: Vec<NamedTime>,
}

/// Parameters that a rank holds of a traced block, before ZeRO.
pub(crate) fn elements(trace: &Trace) -> Elements {
    let mut elements = Elements::default();
    for parameter in &trace.parameters {
        if parameter.expert {
            elements.expert += parameter.local_elements;
        } else {
            elements.dense += parameter.local_elements;
        }
    }
    elements
}

impl BlockKey {
    /// The key of a block under a strategy.
    #[must_use]
    pub fn of(
        scenario: &Scenario,
        strategy: &Strategy,
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
        Self {
            class,
            layout,
            recompute,
            overlap_tp: strategy.overlap.tensor_parallel,
            groups,
        }
    }
}
