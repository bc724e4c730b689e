//! What ring attention sends, and what it does beside its attention kernels.
//!
//! Every rank's block of keys gives a partial result. Partial results are added up, weighted by their softmax sums. In backward the
//! gradients that come from different blocks are added up too. We count the last rank of the ring. With causal attention and balanced
//! halves, all its queries attend to the first half of every other rank's keys. Over both passes no rank moves more bytes, and the others
//! wait for it.
//!
//! Sources: Transformer Engine at d0067d0, `attention/dot_product_attention/context_parallel.py`, `AttnFuncWithCPAndKVP2P`; PyTorch 2.15,
//! `_templated_ring_attention` and `_templated_ring_attention_backward` of `torch.distributed.tensor.experimental`.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{AnyOp, AttentionShape, Collective, CollectiveKind, Operator, Pass, Trace};

use super::kernel::{Chain, Kernel, KernelKind};
use super::lowering::Lowering;
use crate::price::MemoryKind;

/// Bytes of a number of 32 bits, in which PyTorch adds up partial results and gradients.
const WIDE: u64 = 4;

/// The tensors of ring attention on one rank.
#[derive(Clone, Copy, Debug)]
struct Ring {
    /// Elements of the queries.
    queries: u64,
    /// Elements of keys and values together.
    pairs: u64,
    /// Elements of the result.
    output: u64,
    /// Bytes of an element.
    size: u64,
    /// Blocks of keys: one of every rank.
    blocks: u64,
}

/// Bytes that a rank sends in a step of the ring. PyTorch repeats keys and values for every query head first. It sends their gradients
/// in 32 bits, once more than there are steps; the bytes of that extra message are spread over the steps.
pub(super) fn sent(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    collective: Collective,
) -> u64 {
    if !lowering.has(Rewrite::RingInPytorch) {
        return collective.bytes;
    }
    let size = trace.tensor(op.inputs[0]).dtype.size();
    let shapes = trace.forward.iter().find_map(|op| shape(op.operator));
    let Some(ring) = shapes.map(|shape| Ring::of(lowering, shape, size)) else {
        return collective.bytes;
    };
    let gradients = match op.pass {
        Pass::Forward => 0,
        _ => ring.pairs * WIDE * ring.blocks / (ring.blocks - 1),
    };
    ring.pairs * size + gradients
}

/// A kernel that stands for all adding up beside this attention kernel; `None` if keys and values do not go around a ring.
pub(super) fn sums(lowering: &Lowering<'_>, trace: &Trace, attention: &Kernel) -> Option<Kernel> {
    let KernelKind::Attention { shape, .. } = attention.kind else {
        return None;
    };
    let is_ring = |of: Collective| of.kind == CollectiveKind::RingExchange;
    let mut exchanges = trace.forward.iter().filter_map(|op| match op.operator {
        Operator::Exchange(exchange) if is_ring(exchange.collective) => Some(op.inputs[0]),
        _ => None,
    });
    let size = trace.tensor(exchanges.next()?).dtype.size();
    let ring = Ring::of(lowering, shape, size);
    let forward = attention.pass == Pass::Forward;
    let pytorch = lowering.has(Rewrite::RingInPytorch);
    let Chain { bytes, launches } = match (pytorch, lowering.has(Rewrite::FusePointwise)) {
        (false, _) => ring.in_place(forward),
        (true, false) => ring.by_operators(forward),
        (true, true) => ring.compiled(forward),
    };
    Some(Kernel {
        kind: KernelKind::Memory {
            kind: MemoryKind::Pointwise,
            bytes,
            launches,
        },
        reads: Vec::new(),
        writes: Vec::new(),
        ..attention.clone()
    })
}

fn shape(operator: Operator) -> Option<AttentionShape> {
    match operator {
        Operator::Attention(attention) => Some(attention.shape),
        _ => None,
    }
}

impl Ring {
    fn of(lowering: &Lowering<'_>, shape: AttentionShape, size: u64) -> Self {
        let heads = match lowering.has(Rewrite::RingInPytorch) {
            true => shape.heads,
            false => shape.kv_heads,
        };
        let tokens = shape.batch * shape.q_len;
        Self {
            queries: tokens * shape.heads * shape.qk_dim,
            pairs: tokens * heads * (shape.qk_dim + shape.v_dim),
            output: tokens * shape.heads * shape.v_dim,
            size,
            blocks: (shape.kv_len / shape.q_len).max(2),
        }
    }

    /// Transformer Engine: keys and values are first copied to one buffer. In forward one fused kernel adds each partial result in
    /// place; in backward `add_` adds gradients. All this counts as one launch, as do the attention kernels of all blocks: one function
    /// issues them, and each launch inside it takes a fraction of the host's time for a module's kernel.
    fn in_place(self, forward: bool) -> Chain {
        let (copy, add) = (2 * self.size, 3 * self.size);
        let others = self.blocks - 1;
        if forward {
            let bytes = self.output * (copy + add * others) + self.pairs * copy;
            return chain(bytes, 1);
        }
        // For the first other block the gradients of half its keys and values are copied, for each further block they are added. For the
        // rank's own block the whole gradients are added.
        let halves = copy + add * (others - 1);
        let queries = copy + add * others;
        let bytes = self.queries * queries + self.pairs * (copy + halves / 2 + add);
        chain(bytes, 1)
    }

    /// PyTorch, operator by operator.
    fn by_operators(self, forward: bool) -> Chain {
        let cast = self.size + WIDE;
        let others = self.blocks - 1;
        // Keys and values are copied once because they are views, and to one buffer each time they are sent on.
        let copies = self.pairs * 2 * self.size * self.blocks;
        if forward {
            // Three operators on results: a difference, its product with a sigmoid, another difference. Five on softmax sums, which are
            // small, count as launches only.
            let weighted = 8 * WIDE;
            let bytes = self.output * (cast * (self.blocks + 1) + weighted * others) + copies;
            return chain(bytes, self.blocks + 3 + 9 * others);
        }
        let add = 2 * WIDE + self.size;
        let copy = 2 * WIDE;
        // Gradients are cleared, added up and cast. For another rank's block half of the gradients of keys and values is added, then
        // `cat` copies both halves. For every block `cat` copies all of them to one buffer.
        let queries = WIDE + add * self.blocks + cast;
        let pairs = WIDE + add + (add / 2 + copy) * others + copy * self.blocks + cast;
        let bytes = self.queries * queries + self.pairs * pairs + copies;
        chain(bytes, 9 + 2 * self.blocks + 5 * others)
    }

    /// PyTorch under `torch.compile`: one kernel reads all partial results. Keys and values are gathered from all ranks at once, so they
    /// are copied to a buffer once. One kernel for every block adds to the gradients that arrived and writes those that are sent.
    fn compiled(self, forward: bool) -> Chain {
        let all = self.size * (self.blocks + 1);
        let buffer = self.pairs * 2 * self.size;
        if forward {
            return chain(self.output * all + buffer, 2);
        }
        let cast = self.size + WIDE;
        let others = self.blocks - 1;
        let pairs = 2 * cast + (2 * WIDE + self.size / 2) * others;
        chain(
            self.queries * all + self.pairs * pairs + buffer,
            3 + self.blocks,
        )
    }
}

fn chain(bytes: u64, launches: u64) -> Chain {
    Chain {
        bytes: Bytes(bytes),
        launches: launches as u32,
    }
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::{BlockClass, BlockLayout};

    use super::super::small_model::{KEYS, TOKENS, model};
    use super::*;
    use crate::lower::Lowered;

    /// A layer whose sequence is divided among so many ranks, as a runtime runs it.
    fn lowered(runtime: &str, ranks: u64) -> Lowered {
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let model = model("llama", "");
        let class = BlockClass::Layer(model.layer_class(0));
        let layout = BlockLayout {
            cp: ranks,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let trace = models::trace_block(&model, class, &layout).expect("a block");
        Lowering::new(&runtime, runtime.fp8_recipe).lower(&trace)
    }

    /// Bytes that a step of the ring sends, forward and backward, per token of a rank.
    fn messages(runtime: &str, ranks: u64) -> [u64; 2] {
        let Lowered { forward, backward } = lowered(runtime, ranks);
        [forward, backward].map(|kernels| {
            let mut sent = kernels.iter().filter_map(|kernel| match kernel.kind {
                KernelKind::Comm(of) => Some(of.bytes / (TOKENS / ranks)),
                _ => None,
            });
            let bytes = sent.next().expect("a message");
            assert_eq!(sent.next(), None);
            bytes
        })
    }

    /// Bytes that adding up moves beside attention, forward and backward, per token of a rank.
    fn summed(runtime: &str, ranks: u64) -> [u64; 2] {
        let Lowered { forward, backward } = lowered(runtime, ranks);
        [forward, backward].map(|kernels| {
            let attention = |kernel: &Kernel| matches!(kernel.kind, KernelKind::Attention { .. });
            let at = kernels.iter().position(attention).expect("attention");
            match kernels[at + 1].kind {
                KernelKind::Memory { bytes, .. } => bytes.0 / (TOKENS / ranks),
                other => panic!("{other:?}"),
            }
        })
    }

    #[test]
    fn pytorch_sends_keys_for_every_query_head_and_their_gradients_in_32_bits() {
        let pairs = 2 * KEYS;
        for ranks in [2, 4] {
            assert_eq!(messages("megatron-core", ranks), [2 * pairs, 4 * pairs]);
            // There are twice as many query heads as key heads. A step sends 2 bytes of each number. Gradients have 4 bytes and are sent
            // once more than there are steps.
            let all = 2 * pairs;
            let gradients = all * 4 * ranks / (ranks - 1);
            assert_eq!(
                messages("torchtitan", ranks),
                [2 * all, 2 * all + gradients],
                "{ranks}"
            );
        }
    }

    #[test]
    fn partial_results_are_added_up_in_16_bits_in_32_bits_or_in_one_compiled_kernel() {
        // Per token, queries and results have 64 numbers each. Keys and values together have 64, or 128 when PyTorch repeats them.
        for (runtime, two_ranks, four_ranks) in [
            (
                "megatron-core",
                [64 * (4 + 6) + 64 * 4, 64 * (4 + 6) + 64 * (4 + 2 + 6)],
                [64 * (4 + 18) + 64 * 4, 64 * (4 + 18) + 64 * (4 + 2 + 6 + 6)],
            ),
            (
                "torchtitan",
                [
                    64 * (18 + 32) + 128 * 8,
                    64 * (4 + 20 + 6) + 128 * (4 + 10 + 13 + 16 + 6 + 8),
                ],
                [
                    64 * (30 + 96) + 128 * 16,
                    64 * (4 + 40 + 6) + 128 * (4 + 10 + 39 + 32 + 6 + 16),
                ],
            ),
            (
                "torchtitan-compile",
                [64 * 6 + 128 * 4, 64 * 6 + 128 * (12 + 9 + 4)],
                [64 * 10 + 128 * 4, 64 * 10 + 128 * (12 + 27 + 4)],
            ),
        ] {
            assert_eq!(summed(runtime, 2), two_ranks, "{runtime}");
            assert_eq!(summed(runtime, 4), four_ranks, "{runtime}");
        }
    }
}
