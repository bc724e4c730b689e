//! Norms that read a copy of their input in 32 bits, made by a kernel of its own (InternLM `modeling_internlm.py` at fa7337b:
//! `norm1(_residual.float())`).
//!
//! The copies are not kept for backward. Each is made again just before the backward pass of its norm, and the norm runs again on it
//! (`dropout_selective_checkpoint` of the same file). The norm before the model's head is the exception: its copy is kept.

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{AnyOp, Op, Operator, Pass, Trace};

use super::kernel::{Chain, Kernel, KernelKind};
use super::lowering::{Lowering, has_loss};

/// Adds to a norm's kernel what reading a 32-bit copy of its input changes: the kernel moves more bytes, and a second kernel casts.
/// The second kernel makes the copy in forward; in backward it brings the gradient of the copy back to the input's type.
pub(super) fn with_cast(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    mut norm: Kernel,
) -> Vec<Kernel> {
    if !copies(lowering, op.operator) {
        return vec![norm];
    }
    let input = trace.tensor(op.inputs[0]);
    let (narrow, wide) = (input.dtype.size(), DType::F32.size());
    let cast = norm.beside(Chain {
        bytes: Bytes(input.elements() * (narrow + wide)),
        launches: 1,
    });
    let forward = norm.pass == Pass::Forward;
    if let KernelKind::Memory { bytes, .. } = &mut norm.kind {
        // In backward the input and its gradient both have 32 bits.
        let times = if forward { 1 } else { 2 };
        *bytes += Bytes(times * input.elements() * wide.saturating_sub(narrow));
    }
    match forward {
        true => vec![cast, norm],
        false => vec![norm, cast],
    }
}

/// Whether an operator is a norm whose forward is repeated before its backward, even where the strategy recomputes nothing.
pub(super) fn runs_again(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> bool {
    copies(lowering, op.operator) && !has_loss(trace)
}

/// Additional bytes that a norm keeps for backward where it keeps its input in 32 bits instead of 16. `None` where it does not.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let input = trace.tensor(op.inputs[0]);
    let kept = copies(lowering, op.operator) && has_loss(trace);
    let wider = DType::F32.size().saturating_sub(input.dtype.size());
    kept.then(|| Bytes(input.elements() * wider))
}

fn copies(lowering: &Lowering<'_>, operator: Operator) -> bool {
    lowering.has(Rewrite::NormOnCopy) && matches!(operator, Operator::Norm(_))
}

#[cfg(test)]
mod tests {
    use models::{BlockClass, BlockLayout};
    use plans::Recompute;

    use super::*;
    use crate::lower::recomputed;
    use crate::lower::testing::{self, lowered};

    /// The block of this class, traced in bf16.
    fn trace(class: fn(&catalog::Model) -> BlockClass) -> Trace {
        let model = catalog::load::model("llama3-8b").expect("a preset");
        let layout = BlockLayout::alone(1, 32, DType::Bf16);
        models::trace_block(&model, class(&model), &layout).expect("a block")
    }

    fn layer(model: &catalog::Model) -> BlockClass {
        BlockClass::Layer(model.layer_class(0))
    }

    /// Bytes that the kernels of a layer's norms move, for each element of their inputs, in forward and in backward.
    fn moved(runtime: &str) -> [u64; 2] {
        let trace = trace(layer);
        let lowered = lowered(&testing::runtime(runtime), &trace);
        [(&lowered.forward, 4), (&lowered.backward, 6)].map(|(kernels, fused)| {
            let norm = |kernel: &&Kernel| {
                matches!(trace.op(kernel.pass, kernel.op).operator, Operator::Norm(_))
            };
            let bytes = |kernel: &Kernel| match kernel.kind {
                KernelKind::Memory { bytes, .. } => bytes.0,
                _ => panic!("not bound by memory"),
            };
            let all: u64 = kernels.iter().filter(norm).map(bytes).sum();
            // Two norms of 32 tokens of 4096 entries; weights and statistics are less than an element.
            let each = all / (2 * 32 * 4096);
            assert!(each >= fused, "{each}");
            each
        })
    }

    #[test]
    fn a_norm_on_a_copy_moves_the_copy_too() {
        assert_eq!(moved("megatron-2022"), [4, 6]);
        // Forward casts (2 + 4) and reads 4 instead of 2; backward reads and writes 4 instead of 2, and casts (4 + 2).
        assert_eq!(moved("internevo"), [4 + 6 + 2, 6 + 4 + 6]);
    }

    #[test]
    fn norms_of_layers_run_again_though_nothing_else_does() {
        let runtime = catalog::load::runtime("internevo").expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let again = |class| {
            let trace = trace(class);
            let lowered = lowering.lower(&trace);
            let again = recomputed(&lowering, &trace, &lowered, Recompute::None);
            let kept = trace
                .forward
                .iter()
                .filter_map(|op| kept(&lowering, &trace, op));
            (again.len(), kept.map(|bytes| bytes.0).sum::<u64>())
        };
        // The cast and the norm, twice.
        assert_eq!(again(layer), (4, 0));
        // The head's norm keeps its copy in 32 bits instead of its input in 16.
        assert_eq!(again(|_| BlockClass::Head), (0, 2 * 32 * 4096));
    }
}
