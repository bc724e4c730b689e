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
    /// For every layer class: the cost of a stage's last layer, and of its first, which `Layers` may recompute.
    pub(crate) layers: Vec<[Arc<BlockCost>; 2]>,
}

/// Everything in a strategy that the costs of its blocks depend on. Strategies with equal keys have the same [`Blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlocksKey {
    layout: BlockLayout,
    groups: BlockGroups,
    /// What is recomputed of a stage's first layers, and of the others.
    recompute: [Recompute; 2],
    execution: Execution,
    /// Element type of the buffer that gradients of weights are added up in.
    accumulates: DType,
    /// The bits of [`passes_alone`], where passes of other micro-batches run beside messages to experts.
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

/// Share of the passes beside which no pass of another micro-batch runs, where forward passes alternate with backward
/// passes: of a pipeline rank all forward passes before its first backward pass, and as many backward passes after its last
/// forward pass. With `v` stages on each of `p` ranks these are `2·(p − 1 − r) + (v − 1)·p + 1` on rank `r`, the one more of
/// Megatron-Core's schedule included (`get_pp_rank_microbatches`), on average `v·p` of `v·m`.
pub(crate) fn passes_alone(d: &Decisions) -> f64 {
    (d.pp as f64 / d.num_micro_batches as f64).min(1.0)
}

impl Blocks {
    /// All blocks, some twice.
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

    /// Bytes that a stage hands to the next.
    pub(crate) fn output(&self) -> Bytes {
        let layer = self.layers.first().map(|[asked, _]| asked.output);
        layer.unwrap_or(self.embedding.output)
    }
}
