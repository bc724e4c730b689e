//! The costs of all kinds of blocks of a strategy, from which its stages are built.

use std::sync::Arc;

use catalog::{Bytes, DType};
use models::BlockLayout;
use plans::{Decisions, Recompute};

use crate::Scenario;
use crate::block_cost::{BlockCost, BlockGroups};
use crate::execution::Execution;
use crate::states;

/// The costs of the blocks of a strategy, one of each kind.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    pub(crate) embedding: Arc<BlockCost>,
    pub(crate) head: Arc<BlockCost>,
    pub(crate) mtp: Option<Arc<BlockCost>>,
    /// For every layer class: the cost of a stage's other layers, then that of its first layers.
    pub(crate) layers: Vec<[Arc<BlockCost>; 2]>,
}

/// Everything in a strategy that the costs of its blocks depend on. Strategies with equal keys have the same [`Blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlocksKey {
    layout: BlockLayout,
    groups: BlockGroups,
    /// What a stage's first layers recompute, and what its other layers do.
    recompute: [Recompute; 2],
    execution: Execution,
    /// Element type of the buffer in which weight gradients are accumulated.
    accumulates: DType,
    /// Bits of [`passes_alone`]; `None` unless passes run beside others' expert messages.
    alone: Option<u64>,
}

impl BlocksKey {
    /// The key of a strategy whose passes run in the given way.
    pub(crate) fn new(scenario: &Scenario, d: &Decisions, execution: Execution) -> Self {
        let Scenario {
            runtime, workload, ..
        } = scenario;
        let beside = execution.beside_others && d.ep > 1;
        Self {
            layout: BlockLayout::of(d, workload.seq_len, workload.precision),
            groups: BlockGroups::of(d),
            recompute: d.recompute.of_first_and_others(),
            execution,
            accumulates: states::accumulation_type(runtime, d, workload.precision),
            alone: beside.then(|| passes_alone(d).to_bits()),
        }
    }
}

/// Share of passes that run alone if forward and backward passes of micro-batches overlap: on a
/// rank, the forward passes before its first backward, and as many backward passes at its end. With
/// `v` stages on each of `p` ranks rank `r` has `2·(p − 1 − r) + (v − 1)·p + 1` of them, also in
/// Megatron-Core (`get_pp_rank_microbatches`): on average `v·p` of `v·m`.
pub(crate) fn passes_alone(d: &Decisions) -> f64 {
    (d.pp as f64 / d.num_micro_batches as f64).min(1.0)
}

impl Blocks {
    /// All blocks; some appear twice.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<BlockCost>> {
        let ends = [&self.embedding, &self.head].into_iter().chain(&self.mtp);
        ends.chain(self.layers.iter().flatten())
    }

    /// By kind: embedding, head, prediction module; per layer class a stage's last and first layer.
    pub(crate) fn of_kind(&self) -> Vec<Option<&Arc<BlockCost>>> {
        let ends = [Some(&self.embedding), Some(&self.head), self.mtp.as_ref()];
        let layers = self.layers.iter().flatten().map(Some);
        ends.into_iter().chain(layers).collect()
    }

    /// Whether a kind of block in [`Blocks::of_kind`] is the embedding or the head.
    pub(crate) fn is_end(kind: usize) -> bool {
        kind < 2
    }

    /// Bytes that a stage hands to the next.
    pub(crate) fn output(&self) -> Bytes {
        let layer = self.layers.first().map(|[asked, _]| asked.output);
        layer.unwrap_or(self.embedding.output)
    }
}
