//! Kernels of the embedding, and of the loss and its gradient.
//!
//! Megatron-LM computes both by chains of PyTorch operators, most of which read and write one number for each token. Such an operator
//! is done on the GPU sooner than the host can launch the next. A model with small layers waits for these launches, so they are
//! counted: the constants here are numbers of operators in Megatron-LM v2.6: `mpu/layers.py`, `mpu/cross_entropy.py`, `pretrain_gpt.py` and
//! `megatron/utils.py`.

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes};
use dtensor::{AnyOp, CostClass, Operator, Pass, Pointwise, TensorId, Token, Trace};

use super::kernel::{Chain, Kernel, KernelKind, traffic};
use super::lowering::Lowering;
use crate::price::MemoryKind;

/// Operators that turn what the data loader returns into a micro-batch (`get_batch`): they copy it to the GPU, broadcast it to the
/// other tensor-parallel ranks, split it into tokens and labels, and make the masks of attention and of the loss.
const OF_A_BATCH: u32 = 11;
/// Operators that set to zero what a rank looks up for tokens outside its part of the vocabulary.
const OF_A_MASKED_EMBEDDING: u32 = 7;
/// Operators of the loss: 17 compute the cross-entropy of every token, and nine average it over tokens, data-parallel ranks and
/// micro-batches.
const OF_THE_LOSS: u32 = 26;
/// All-reduces of the loss that the trace leaves out where ranks hold parts of the vocabulary: one finds the largest logit, one
/// fetches the logit of the label. (The trace has the third, of the sum of exponentials.)
const MORE_ALL_REDUCES: u32 = 2;
/// Operators of the gradient of the loss.
const OF_ITS_GRADIENT: u32 = 10;

/// The kernel of the embedding of tokens or positions, or of its gradient.
pub(super) fn embedding(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Kernel {
    let first = trace.ops().find(|op| op.cost() == CostClass::Embedding);
    let of_tokens = first.is_some_and(|first| first.outputs == op.outputs);
    let chained = lowering.has(Rewrite::VocabularyByOperators) && of_tokens;
    if lowering.has(Rewrite::EmbedByProduct)
        && let Some(product) = one_hot_product(trace, op)
    {
        return Kernel::of(op, product);
    }
    let masks = if is_divided(trace) {
        OF_A_MASKED_EMBEDDING
    } else {
        0
    };
    let chain = Chain {
        bytes: traffic(trace, op.inputs, op.outputs),
        launches: if chained { 1 + OF_A_BATCH + masks } else { 1 },
    };
    Kernel::of(op, chain.bound_by_memory(MemoryKind::Embedding))
}

/// The matrix product that embeds tokens: every token is a row of zeros with a one at the token's index, and these rows are multiplied
/// by the table. For a backward operator, the product that computes the table's gradient. The cost of making the rows is left out.
fn one_hot_product(trace: &Trace, op: &AnyOp<'_>) -> Option<KernelKind> {
    let Operator::Token(Token::Embedding(table)) = op.operator else {
        return None;
    };
    let [words, hidden] = *trace.tensor(table).shape else {
        return None;
    };
    let rows = |ids: &[TensorId]| trace.tensor(ids[0]).elements() / hidden;
    Some(KernelKind::Gemm {
        sizes: match op.pass {
            Pass::Forward | Pass::BackwardInput => [rows(op.outputs), hidden, words],
            Pass::BackwardWeight => [words, hidden, rows(op.inputs)],
        },
        low_precision: false,
    })
}

/// How often the kernels of a loss read or write all logits, in forward and in backward. Copies to 32 bits and back are kernels of
/// their own.
type Passes = [u64; 2];

/// Megatron-LM (NVIDIA/Megatron-LM@d98e8a6, `core/tensor_parallel/cross_entropy.py`): forward reads the logits for their maximum,
/// subtracts it and takes exponentials in place, adds these up, and divides by the sum in place. Backward multiplies in place.
const OF_MEGATRON: Passes = [8, 2];
/// PyTorch's log-softmax (`SoftMax.cu`). Forward reads the logits three times: for their maximum, for the sum of their exponentials,
/// and to write the log-probabilities. Backward writes the gradient of the log-probabilities, reads it for its sum, then reads it
/// and the log-probabilities to write the gradient of the logits.
const OF_PYTORCH: Passes = [4, 5];
/// PyTorch's loss where the vocabulary is split over ranks (`tensor/parallel/loss.py`), one operator after the other. Forward: the
/// maximum of the logits, the logits less it, their exponentials, the sum of these, the logits less its logarithm. Backward: a
/// tensor of zeros, the probabilities, the sum of both tensors, and its product with the gradient of the loss.
const OF_SPLIT_PYTORCH: Passes = [8, 8];
/// A loss that is one kernel: forward reads logits; backward reads them and writes the gradient.
const OF_ONE_KERNEL: Passes = [1, 2];

/// The kernel of the cross-entropy loss or of its gradient; `None` if the forward kernel has already computed the gradient.
pub(super) fn loss(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Kernel> {
    let [fused, in_place] =
        [Rewrite::FuseCrossEntropy, Rewrite::InPlaceCrossEntropy].map(|of| lowering.has(of));
    let backward = op.pass != Pass::Forward;
    let wide = lowering.has(Rewrite::WideLossGradient);
    if fused && in_place && !wide {
        return (!backward).then(|| with_gradient(trace, op));
    }
    let one_kernel = fused || lowering.has(Rewrite::FusePointwise);
    let divided = is_divided(trace);
    let passes = if one_kernel {
        OF_ONE_KERNEL
    } else if in_place {
        OF_MEGATRON
    } else if divided {
        OF_SPLIT_PYTORCH
    } else {
        OF_PYTORCH
    };
    let more = if divided { MORE_ALL_REDUCES } else { 0 };
    let launches = match op.pass {
        _ if one_kernel => 1,
        _ if !lowering.has(Rewrite::VocabularyByOperators) => 2,
        Pass::Forward => OF_THE_LOSS + more,
        Pass::BackwardInput | Pass::BackwardWeight => OF_ITS_GRADIENT,
    };
    let [written, read] = logits(trace);
    let counted = read * passes[usize::from(backward)];
    let (kind, bytes) = match one_kernel {
        // It reads 16-bit logits twice and writes their gradient in 32 bits, which backward multiplies by that of the loss.
        true if fused && wide && backward => (MemoryKind::Pointwise, read * 2),
        true if fused && wide => (MemoryKind::Pointwise, written * 2 + read),
        true => (MemoryKind::CrossEntropy, counted),
        false => (MemoryKind::LossOperators, counted),
    };
    let chain = Chain { bytes, launches };
    let mut kernel = Kernel::of(op, chain.bound_by_memory(kind));
    // The gradient overwrites logits or probabilities, which are counted as kept from forward.
    if fused || (in_place && backward) {
        kernel.writes.clear();
    }
    Some(kernel)
}

/// The kernel of a loss that also computes the gradient of the logits, so that backward needs no kernel. It reads the logits
/// twice, in the type in which the head wrote them, and overwrites them with the gradient.
fn with_gradient(trace: &Trace, op: &AnyOp<'_>) -> Kernel {
    let [written, _] = logits(trace);
    let chain = Chain {
        bytes: written * 3,
        launches: 1,
    };
    Kernel {
        writes: Vec::new(),
        ..Kernel::of(op, chain.bound_by_memory(MemoryKind::Pointwise))
    }
}

/// Bytes of the logits in the type in which the head writes them, and in the type in which the traced loss reads them.
pub(super) fn logits(trace: &Trace) -> [Bytes; 2] {
    let mut losses = (trace.forward.iter())
        .filter(|op| matches!(op.operator, Operator::Token(Token::CrossEntropy(_))));
    let Some(read) = losses.next().map(|loss| loss.inputs[0]) else {
        return [Bytes(0); 2];
    };
    let mut copies = (trace.forward.iter())
        .filter(|op| matches!(op.operator, Operator::Pointwise(Pointwise::Copy)));
    let copy = copies.find(|copy| copy.outputs[0] == read);
    let written = copy.map_or(read, |copy| copy.inputs[0]);
    [written, read].map(|id| trace.tensor(id).bytes())
}

/// Whether an operator is the copy of the logits to 32 bits before a fused loss, or the backward of that copy, and the kernel of the
/// loss makes it needless. A gradient in 32 bits is still copied to 16.
pub(super) fn is_in_fused_loss(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> bool {
    let needless = lowering.has(Rewrite::FuseCrossEntropy)
        && (op.pass == Pass::Forward || !lowering.has(Rewrite::WideLossGradient));
    needless && is_loss_copy(trace, op)
}

/// Whether an operator is the copy of the logits to 32 bits before the loss, or the backward of that copy.
fn is_loss_copy(trace: &Trace, op: &AnyOp<'_>) -> bool {
    let wide = |id: &dtensor::TensorId| trace.tensor(*id).dtype == catalog::DType::F32;
    op.cost() == CostClass::Copy && op.inputs.iter().any(wide) != op.outputs.iter().any(wide)
}

/// Whether tensor-parallel ranks hold parts of the vocabulary: then they add up what they computed of it.
fn is_divided(trace: &Trace) -> bool {
    trace
        .ops()
        .any(|op| matches!(op.cost(), CostClass::Collective(of) if of.axis == Axis::Tp))
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::{BlockClass, BlockLayout};
    use plans::Recompute;

    use super::*;
    use crate::lower::KernelKind;

    /// The head of Llama-3 8B, on one of `tp` ranks.
    fn head(tp: u64) -> Trace {
        let model = catalog::load::model("llama3-8b").expect("a preset");
        let layout = BlockLayout {
            tp,
            ..BlockLayout::alone(1, 32, DType::Bf16)
        };
        models::trace_block(&model, BlockClass::Head, &layout).expect("a block")
    }

    /// Bytes that the loss and its gradient move for each logit, beside copies to 32 bits.
    fn moved(runtime: &str, tp: u64) -> Vec<u64> {
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let trace = head(tp);
        let logits = logits(&trace)[1].0 / 4;
        let losses = trace
            .ops()
            .filter(|op| op.cost() == CostClass::CrossEntropy);
        let kernels = losses.filter_map(|op| loss(&lowering, &trace, &op));
        let bytes = kernels.map(|kernel| match kernel.kind {
            KernelKind::Memory { bytes, .. } => bytes.0 / logits,
            other => panic!("{other:?}"),
        });
        bytes.collect()
    }

    #[test]
    fn a_loss_moves_what_its_operators_read_and_write() {
        for (runtime, tp, expected) in [
            ("megatron-core", 1, &[32, 8][..]),
            ("megatron-core", 4, &[32, 8]),
            ("hf-trainer", 1, &[16, 20]),
            ("torchtitan", 4, &[32, 32]),
            ("torchtitan-compile", 1, &[4, 8]),
            ("llm-foundry", 1, &[4, 8]),
            // Forward computes the gradient.
            ("vescale-cuda", 1, &[6]),
            // The same, but the gradient has 32 bits, and backward scales it.
            ("nemo", 1, &[8, 8]),
        ] {
            assert_eq!(moved(runtime, tp), expected, "{runtime}, tp={tp}");
        }
    }

    /// Under Megatron-LM a logit takes 6 bytes at the peak: 4 of its 32-bit copy, which becomes its probability and then its
    /// gradient, and 2 of that gradient in 16 bits. Under Transformer Engine 2.18 too: 4 of a 32-bit gradient, 2 of its 16-bit copy.
    /// linkedin/Liger-Kernel@ead96b61 measured 8 for Megatron-LM, of which 2 are the logits themselves.
    #[test]
    fn a_gradient_in_place_needs_no_memory() {
        for (runtime, expected) in [("megatron-core", 6), ("nemo", 6)] {
            let runtime = catalog::load::runtime(runtime).expect("a preset");
            let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
            let trace = head(1);
            let lowered = lowering.lower(&trace);
            let [memory] = lowering.memory(&trace, &lowered, &[Recompute::None], 1)[..] else {
                panic!("one way to recompute");
            };
            let peak = memory.saved_bytes + memory.transient_backward;
            let per_logit = peak.0 / (logits(&trace)[1].0 / 4);
            assert_eq!(per_logit, expected, "{}", runtime.name);
        }
    }

    /// Launches of the embedding, of the loss, and of its gradient, on one of `tp` ranks.
    fn launches(runtime: &str, tp: u64) -> [u32; 3] {
        let model = catalog::load::model("gpt3-175b").expect("a preset");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let layout = BlockLayout {
            tp,
            ..BlockLayout::alone(1, 32, DType::F16)
        };
        let of = |class, cost, pass| {
            let trace = models::trace_block(&model, class, &layout).expect("a block");
            let op = (trace.ops())
                .find(|op| op.cost() == cost && op.pass == pass)
                .expect("an operator");
            let kernel = match cost {
                CostClass::Embedding => Some(embedding(&lowering, &trace, &op)),
                _ => loss(&lowering, &trace, &op),
            };
            match kernel.expect("a kernel").kind {
                KernelKind::Memory { launches, .. } => launches,
                other => panic!("{other:?}"),
            }
        };
        [
            of(BlockClass::Embedding, CostClass::Embedding, Pass::Forward),
            of(BlockClass::Head, CostClass::CrossEntropy, Pass::Forward),
            of(
                BlockClass::Head,
                CostClass::CrossEntropy,
                Pass::BackwardInput,
            ),
        ]
    }

    #[test]
    fn megatron_launches_an_operator_at_a_time() {
        for (runtime, tp, expected) in [
            ("megatron-2022", 1, [12, 26, 10]),
            ("megatron-2022", 8, [19, 28, 10]),
            // One fused kernel each, or two passes of PyTorch's.
            ("paddle", 8, [1, 2, 2]),
            ("llm-foundry", 1, [1, 1, 1]),
        ] {
            assert_eq!(launches(runtime, tp), expected, "{runtime}, tp={tp}");
        }
    }
}
