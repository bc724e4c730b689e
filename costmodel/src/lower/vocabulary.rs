//! Kernels of the embedding, and of the loss and its gradient.
//!
//! Megatron-LM computes both by chains of PyTorch operators, most of which read and write one number for each token. Such an operator
//! is done on the GPU sooner than the host can launch the next. A model with small layers waits for these launches, so they are
//! counted: the constants here are numbers of operators in Megatron-LM v2.6: `mpu/layers.py`, `mpu/cross_entropy.py`, `pretrain_gpt.py` and
//! `megatron/utils.py`.

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{AnyOp, CostClass, Operator, Pass, Pointwise, Trace};

use super::kernel::{Chain, Kernel, traffic};
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

/// The kernel of the cross-entropy loss or of its gradient; `None` if the forward kernel has already computed the gradient.
/// Eager PyTorch takes two passes over the logits: it casts them to 32 bits, then normalises their exponentials.
pub(super) fn loss(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Kernel> {
    let fused = lowering.has(Rewrite::FuseCrossEntropy);
    if fused && lowering.has(Rewrite::InPlaceCrossEntropy) {
        return (op.pass == Pass::Forward).then(|| in_place(trace, op));
    }
    let one_pass = fused || lowering.has(Rewrite::FusePointwise);
    let passes = if one_pass { 1 } else { 2 };
    let divided = if is_divided(trace) {
        MORE_ALL_REDUCES
    } else {
        0
    };
    let launches = match op.pass {
        _ if one_pass || !lowering.has(Rewrite::VocabularyByOperators) => passes,
        Pass::Forward => OF_THE_LOSS + divided,
        Pass::BackwardInput | Pass::BackwardWeight => OF_ITS_GRADIENT,
    };
    let bytes = traffic(trace, op.inputs, op.outputs) * u64::from(passes);
    let chain = Chain { bytes, launches };
    let mut kernel = Kernel::of(op, chain.bound_by_memory(MemoryKind::CrossEntropy));
    if fused {
        kernel.writes.clear();
    }
    Some(kernel)
}

/// The kernel of a loss that also computes the gradient of the logits, so that backward needs no kernel. It reads the logits
/// twice, in the type in which the head wrote them, and overwrites them with the gradient.
fn in_place(trace: &Trace, op: &AnyOp<'_>) -> Kernel {
    let logits = op.inputs[0];
    let mut copies = trace.forward.iter();
    let copy = copies.find(|copy| {
        matches!(copy.operator, Operator::Pointwise(Pointwise::Copy)) && copy.outputs[0] == logits
    });
    let written = trace.tensor(copy.map_or(logits, |copy| copy.inputs[0]));
    let chain = Chain {
        bytes: written.bytes() * 3,
        launches: 1,
    };
    Kernel {
        writes: Vec::new(),
        ..Kernel::of(op, chain.bound_by_memory(MemoryKind::Pointwise))
    }
}

/// Whether an operator is the copy of the logits to 32 bits before the loss, or the backward of that copy.
pub(super) fn is_loss_copy(trace: &Trace, op: &AnyOp<'_>) -> bool {
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

    use super::*;
    use crate::lower::KernelKind;

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
            ("fsdp1", 1, [1, 1, 1]),
        ] {
            assert_eq!(launches(runtime, tp), expected, "{runtime}, tp={tp}");
        }
    }
}
