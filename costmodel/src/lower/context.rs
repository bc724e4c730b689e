//! What context parallelism sends, and which kernels it adds to attention and to its messages.
//!
//! In ring attention a rank attends to the keys of one rank after another. Each step gives a partial result, and kernels add up the
//! partial results, weighted by their softmax sums. In backward they add up the gradients of all steps. The bytes counted here are those
//! of the last rank of the ring. With causal attention and balanced halves, all its queries attend to the first half of every other
//! rank's keys. Over both passes no rank moves more bytes, so the other ranks wait for this one.
//!
//! A gather or an all-to-all returns the ranks' parts one after another. Transformer Engine then copies the tokens to the order of the
//! sequence, and PyTorch joins the parts along the sequence's dimension. Gradients are copied the other way before they are sent.
//!
//! Sources:
//! - Transformer Engine at d0067d0, `attention/dot_product_attention/context_parallel.py`: the classes `AttnFuncWithCPAndKVP2P` (ring) and
//!   `AttnFuncWithCPAndKVAllGather`, and the function `flash_attn_a2a_communicate`.
//! - PyTorch 2.15, `torch.distributed.tensor.experimental`: the functions `_templated_ring_attention`,
//!   `_templated_ring_attention_backward` and `flex_cp_allgather`.

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes};
use dtensor::{AnyOp, AttentionShape, Collective, CollectiveKind, Operator, Pass, Trace};

use super::kernel::{Chain, FusedAttention, Kernel, KernelKind, WIDE};
use super::lowering::Lowering;

/// Sizes of the tensors that one rank gives to core attention and gets from it.
#[derive(Clone, Copy, Debug)]
struct Local {
    /// Number of elements of the queries.
    queries: u64,
    /// Number of elements of keys and values together.
    pairs: u64,
    /// Number of elements of the result.
    output: u64,
    /// Bytes of an element.
    size: u64,
    /// Number of blocks of keys that the rank attends to, one block from every rank.
    blocks: u64,
}

/// Messages of PyTorch's ring attention in a pass, in the order in which they are sent. torchtitan's model has repeated keys and values for
/// every query head. One gather brings those of all ranks, again in backward. Only their gradients go round: one step sends a block of
/// them, in 32 bits, to the next rank. There is one message more than a ring has steps; its bytes are spread over the steps.
fn rotated(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    ring: Collective,
    message: &Kernel,
) -> Vec<Kernel> {
    let send = |kind, bytes| Kernel {
        kind: KernelKind::Comm(Collective {
            kind,
            bytes,
            ..ring
        }),
        ..message.clone()
    };
    let size = trace.tensor(op.inputs[0]).dtype.size();
    let shapes = trace.forward.iter().find_map(|op| shape(op.operator));
    let Some(local) = shapes.map(|shape| Local::of(lowering, shape, size)) else {
        return vec![message.clone()];
    };
    let gather = send(CollectiveKind::AllGather, local.gathered());
    let gradients = local.pairs * WIDE * local.blocks / (local.blocks - 1);
    match op.pass {
        Pass::Forward => vec![gather],
        _ => vec![gather, send(CollectiveKind::RingExchange, gradients)],
    }
}

/// Bytes of the keys and values of all ranks, which PyTorch's ring attention keeps until it has attended to the last block.
pub(super) fn gathered_by_ring(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    let ring = trace.forward.iter().find_map(|op| match op.operator {
        Operator::Exchange(of) if of.collective.kind == CollectiveKind::RingExchange => {
            Some(trace.tensor(op.inputs[0]).dtype.size())
        }
        _ => None,
    });
    let shapes = trace.forward.iter().find_map(|op| shape(op.operator));
    match (ring, shapes) {
        (Some(size), Some(shape)) if lowering.has(Rewrite::RingInPytorch) => {
            Bytes(Local::of(lowering, shape, size).gathered())
        }
        _ => Bytes(0),
    }
}

/// A message of context parallelism with the kernels before and after it, in launch order.
pub(super) fn messages(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    collective: Collective,
    message: Kernel,
) -> Vec<Kernel> {
    let is_ring = collective.kind == CollectiveKind::RingExchange;
    if is_ring && lowering.has(Rewrite::RingInPytorch) {
        return rotated(lowering, trace, op, collective, &message);
    }
    let copy = |times: u64| Some(message.beside(chain(times * collective.bytes, 1)));
    let [before, after] = match collective.kind {
        CollectiveKind::AllToAll => [copy(2), copy(2)],
        CollectiveKind::AllGather => [None, copy(2)],
        CollectiveKind::ReduceScatter if joins_parts(lowering) => [copy(2), None],
        // Transformer Engine runs attention once for each half of the queries. It clears the gradients of all keys and values, adds what
        // each half gives, and copies the sums. With causal attention both halves together see little more than all keys once.
        CollectiveKind::ReduceScatter => [copy(1 + 3 + 2), None],
        _ => [None, None],
    };
    [before, Some(message), after]
        .into_iter()
        .flatten()
        .collect()
}

/// One memory-bound kernel that stands for all the extra work that context parallelism adds to this
/// attention kernel, such as joining partial results; `None` if it adds none. For example, after a
/// gather of keys and values Transformer Engine runs attention once for each half of the queries,
/// and copies both halves of the result, or of the gradient, to one tensor.
pub(super) fn beside_attention(
    lowering: &Lowering<'_>,
    trace: &Trace,
    attention: &Kernel,
) -> Option<Kernel> {
    let KernelKind::Attention(FusedAttention { shape, .. }) = attention.kind else {
        return None;
    };
    let mut exchanges = trace.forward.iter().filter_map(|op| match op.operator {
        Operator::Exchange(of) if of.collective.axis == Axis::Cp => {
            Some((of.collective.kind, op.inputs[0]))
        }
        _ => None,
    });
    let (kind, keys) = exchanges.next()?;
    let size = trace.tensor(keys).dtype.size();
    let local = Local::of(lowering, shape, size);
    let forward = attention.pass == Pass::Forward;
    let pytorch = lowering.has(Rewrite::RingInPytorch);
    let compiled = lowering.has(Rewrite::FusePointwise);
    let chain = match kind {
        CollectiveKind::RingExchange if pytorch && compiled => local.compiled(forward),
        CollectiveKind::RingExchange if pytorch => local.by_operators(forward),
        CollectiveKind::RingExchange => local.in_place(forward),
        CollectiveKind::AllGather if !joins_parts(lowering) => local.halves(forward),
        _ => return None,
    };
    Some(attention.beside(chain))
}

/// Whether PyTorch gathers keys and values before a single attention kernel: the ranks' parts are joined along the sequence's dimension.
fn joins_parts(lowering: &Lowering<'_>) -> bool {
    lowering.has(Rewrite::RearrangeSequences)
}

fn shape(operator: Operator) -> Option<AttentionShape> {
    match operator {
        Operator::Attention(attention) => Some(attention.shape),
        _ => None,
    }
}

impl Local {
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

    /// Bytes of the keys and values of all ranks.
    fn gathered(self) -> u64 {
        self.pairs * self.size * self.blocks
    }

    /// Extra memory traffic of attention in Transformer Engine's ring. Keys and values are first
    /// copied to one buffer. In forward a fused kernel adds each partial result to the result in
    /// place. In backward `add_` adds the gradients. The host's time is that of a single launch:
    /// one function issues all these kernels, and each takes the host much less time than a kernel
    /// that a module launches.
    fn in_place(self, forward: bool) -> Chain {
        let (copy, add) = (2 * self.size, 3 * self.size);
        let others = self.blocks - 1;
        if forward {
            let bytes = self.output * (copy + add * others) + self.pairs * copy;
            return chain(bytes, 1);
        }
        // The gradients of half the keys and values of another rank's block are copied for the first such block, and added for each later
        // one. The gradients of the rank's own block are added whole.
        let halves = copy + add * (others - 1);
        let queries = copy + add * others;
        let bytes = self.queries * queries + self.pairs * (copy + halves / 2 + add);
        chain(bytes, 1)
    }

    /// Extra memory traffic of attention after Transformer Engine's gather. Forward copies both
    /// halves to the result, and clears one more tensor of the same size, which only packed
    /// sequences use. Backward copies both halves of the queries' gradient.
    fn halves(self, forward: bool) -> Chain {
        match forward {
            true => chain(self.output * 3 * self.size, 1),
            false => chain(self.queries * 2 * self.size, 1),
        }
    }

    /// Extra memory traffic of attention in PyTorch's ring without `torch.compile`: every operator
    /// is a kernel of its own. The engine issues the chain in as many parts as there are blocks;
    /// its launches are those of one part.
    fn by_operators(self, forward: bool) -> Chain {
        let cast = self.size + WIDE;
        let others = self.blocks - 1;
        // Keys and values are copied once because they are views. `cat` then copies them to one buffer in every step but the last, even
        // where one gather has already brought all of them.
        let copies = self.pairs * 2 * self.size * self.blocks;
        if forward {
            // Three operators on results: a difference, its product with a sigmoid, another difference. Five on softmax sums, which are
            // small, count as launches only.
            let weighted = 8 * WIDE;
            let bytes = self.output * (cast * (self.blocks + 1) + weighted * others) + copies;
            return chain(bytes, self.per_block(self.blocks + 3 + 9 * others));
        }
        let add = 2 * WIDE + self.size;
        let copy = 2 * WIDE;
        // Gradients are cleared, added up and cast. For another rank's block half of the gradients of keys and values is added, then
        // `cat` copies both halves. For every block another `cat` copies the gradients of all its keys and values to one buffer.
        let queries = WIDE + add * self.blocks + cast;
        let pairs = WIDE + add + (add / 2 + copy) * others + copy * self.blocks + cast;
        let bytes = self.queries * queries + self.pairs * pairs + copies;
        chain(bytes, self.per_block(9 + 2 * self.blocks + 5 * others))
    }

    /// The mean number of launches for one block of keys, rounded.
    fn per_block(self, launches: u64) -> u64 {
        (launches + self.blocks / 2) / self.blocks
    }

    /// Extra memory traffic of attention in PyTorch's ring under `torch.compile`. In forward one
    /// kernel reads all partial results and writes their sum. Keys and values are gathered from all
    /// ranks at once, so they are copied to a buffer once. In backward there is one kernel for each
    /// block of keys: it adds the block's gradients to those received from the neighbour, and
    /// writes the sums for the next message.
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
    use catalog::{CpKind, DType};
    use models::BlockLayout;

    use super::*;
    use crate::lower::Lowered;
    use crate::lower::testing::{self, KEYS, TOKENS, layer, model};

    /// A layer whose sequence is divided among so many ranks, as a runtime runs it.
    fn lowered(runtime: &str, ranks: u64, exchange: CpKind) -> Lowered {
        let layout = BlockLayout {
            cp: ranks,
            cp_kind: exchange,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let trace = layer(&model("llama", ""), &layout);
        testing::lowered(&testing::runtime(runtime), &trace)
    }

    /// Kind of every message of ring attention in a pass, with its bytes per token of a rank.
    fn messages(kernels: &[Kernel], ranks: u64) -> Vec<(CollectiveKind, u64)> {
        let sent = kernels.iter().filter_map(|kernel| match kernel.kind {
            KernelKind::Comm(of) => Some((of.kind, of.bytes / (TOKENS / ranks))),
            _ => None,
        });
        sent.collect()
    }

    /// Bytes that adding up moves in addition to attention, forward and backward, per token of a
    /// rank.
    fn summed(runtime: &str, ranks: u64) -> [u64; 2] {
        let Lowered { forward, backward } = lowered(runtime, ranks, CpKind::Ring);
        [forward, backward].map(|kernels| {
            let attention = |kernel: &Kernel| matches!(kernel.kind, KernelKind::Attention(_));
            let at = kernels.iter().position(attention).expect("attention");
            match kernels[at + 1].kind {
                KernelKind::Memory { bytes, .. } => bytes.0 / (TOKENS / ranks),
                other => panic!("{other:?}"),
            }
        })
    }

    #[test]
    fn torchtitan_gathers_keys_for_every_query_head_and_sends_their_gradients_in_32_bits() {
        use CollectiveKind::{AllGather, RingExchange};
        let pairs = 2 * KEYS;
        for ranks in [2, 4] {
            let of = |runtime| {
                let Lowered { forward, backward } = lowered(runtime, ranks, CpKind::Ring);
                [forward, backward].map(|kernels| messages(&kernels, ranks))
            };
            // A step sends 2 bytes of each number. Backward sends the gradients beside the keys and values.
            assert_eq!(
                of("megatron-core"),
                [
                    vec![(RingExchange, 2 * pairs)],
                    vec![(RingExchange, 4 * pairs)]
                ]
            );
            // There are twice as many query heads as key heads. Gradients have 4 bytes and are sent once more than a ring has steps.
            let all = 2 * pairs;
            let gather = (AllGather, 2 * all * ranks);
            let gradients = (RingExchange, all * 4 * ranks / (ranks - 1));
            assert_eq!(
                of("torchtitan"),
                [vec![gather], vec![gather, gradients]],
                "{ranks}"
            );
        }
    }

    #[test]
    fn a_ring_launches_as_many_kernels_for_every_block() {
        let launches = |ranks| {
            let Lowered { forward, backward } = lowered("torchtitan", ranks, CpKind::Ring);
            [forward, backward].map(|kernels| {
                let attention = |kernel: &Kernel| matches!(kernel.kind, KernelKind::Attention(_));
                let at = kernels.iter().position(attention).expect("attention");
                match kernels[at + 1].kind {
                    KernelKind::Memory { launches, .. } => launches,
                    other => panic!("{other:?}"),
                }
            })
        };
        // Of two blocks 14 and 18 in all, of four 34 and 32.
        assert_eq!([launches(2), launches(4)], [[7, 9], [9, 8]]);
    }

    #[test]
    fn partial_results_are_added_up_in_16_bits_in_32_bits_or_in_one_compiled_kernel() {
        // Per token, queries and results have 64 numbers each. Keys and values together have 64, or 128 when torchtitan repeats them.
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

    /// What context parallelism runs in a pass, in launch order: `attention`, and for each copy and message its bytes per token of a rank.
    /// A message's number is marked by a `+`.
    fn exchanged(runtime: &str, exchange: CpKind, backward: bool) -> String {
        let Lowered {
            forward,
            backward: gradients,
        } = lowered(runtime, 2, exchange);
        let kernels = if backward { gradients } else { forward };
        let shown = kernels.iter().filter_map(|kernel| match kernel.kind {
            KernelKind::Comm(of) => Some(format!("+{}", of.bytes / (TOKENS / 2))),
            KernelKind::Attention(_) => Some("attention".to_owned()),
            // All other memory-bound kernels of a pass write a tensor.
            KernelKind::Memory { bytes, .. } if kernel.writes.is_empty() => {
                Some((bytes.0 / (TOKENS / 2)).to_string())
            }
            _ => None,
        });
        shown.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn tokens_are_copied_to_the_order_of_the_sequence_and_back() {
        use CpKind::{AllGather, AllToAll};
        let core = "megatron-core";
        // A gather returns both ranks' keys, 32 numbers of 16 bits each, and as many values. Before
        // attention an all-to-all sends queries, keys and values; after it, the result.
        for (runtime, exchange, backward, shown) in [
            (core, AllGather, false, "+128 256 +128 256 attention 384"),
            (core, AllGather, true, "attention 256 768 +128 768 +128"),
            (
                "torchtitan-2026",
                AllGather,
                false,
                "+128 256 +128 256 attention",
            ),
            (
                "torchtitan-2026",
                AllGather,
                true,
                "attention 256 +128 256 +128",
            ),
            (
                core,
                AllToAll,
                false,
                "256 +128 256 128 +64 128 128 +64 128 attention 256 +128 256",
            ),
        ] {
            assert_eq!(exchanged(runtime, exchange, backward), shown, "{runtime}");
        }
    }
}
