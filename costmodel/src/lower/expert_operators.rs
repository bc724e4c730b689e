//! The small operators that Megatron-Core's experts (`TEGroupedMLP`) run between their matrix products, each a kernel of
//! PyTorch. There are two groups of them: those that add the bias of the last product, multiplied by the router's weights
//! (NVIDIA/Megatron-LM@d98e8a6, `core/transformer/moe/experts.py`, `_apply_bias`), and those that clamp the inputs of a gated
//! activation (`core/fusions/fused_bias_geglu.py`, `weighted_bias_quick_geglu_impl`).
//!
//! An operator moves the bytes of every large tensor that it reads and of every one that it writes. Tensors of a single row or
//! column are small, and are left out.

use catalog::Bytes;
use dtensor::{AnyOp, Expert, GatedUnit, Gradient, Operator, Pass, Pointwise, Product, Trace};

use super::kernel::Chain;
use super::lowering::Lowering;

/// How the bias of experts is added under a runtime that launches each expert's products by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Apart {
    /// By the kernel of the product before it: it moves no further bytes and launches no kernel.
    Epilogue,
    /// By separate operators, each a kernel of PyTorch.
    Chain(Chain),
}

/// How the bias of experts is added; `None` for any other operator. cuBLAS adds the bias of the first product, and computes its
/// gradient, in the kernel of the product itself.
pub(super) fn bias(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Apart> {
    if op.operator != Operator::Expert(Expert::Bias) || !lowering.runs_experts_apart() {
        return None;
    }
    let rows = trace.tensor(op.inputs[0]);
    if feeds_activation(trace, op) {
        return Some(Apart::Epilogue);
    }
    let (elements, narrow) = (rows.elements(), rows.dtype.size());
    let wide = lowering.router_weights(rows.dtype).size();
    let is_wide = u64::from(wide > narrow);
    // Forward: bias · weight, the sum, the concatenation of all experts' rows, the cast back.
    // Backward: the cast, and back to the rows' type; for the bias and for the weights each a product and its sum; the
    // concatenation of the rows' gradients.
    let (bytes, each, once) = match op.pass {
        Pass::Forward => (
            wide + (narrow + 2 * wide) + 2 * wide + is_wide * (wide + narrow),
            2,
            1 + is_wide,
        ),
        Pass::BackwardInput | Pass::BackwardWeight => (
            is_wide * 2 * (wide + narrow) + 2 * 3 * wide + 2 * narrow,
            4 + is_wide,
            1 + is_wide,
        ),
    };
    Some(Apart::Chain(Chain {
        bytes: Bytes(elements * bytes),
        launches: (each * local_experts(trace) + once) as u32,
    }))
}

/// The operators that clamp the two inputs of a gated activation of experts, without the activation itself; `None` for any
/// other operator. Forward clamps each input and joins both into one tensor. Backward compares one input with its upper bound
/// and the other with both of its bounds, sets the gradients of clamped elements to zero, and joins the gradients.
pub(super) fn bounds(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    let bounded = is_bounded(op.operator);
    if !bounded || !lowering.runs_experts_apart() {
        return None;
    }
    // Gate, up and their gradients have this shape and type: that of the result.
    let half = match op.pass {
        Pass::Forward => trace.tensor(op.outputs[0]),
        Pass::BackwardInput | Pass::BackwardWeight => trace.tensor(op.inputs[0]),
    };
    let (elements, size, flag) = (half.elements(), half.dtype.size(), 1);
    let (bytes, launches) = match op.pass {
        Pass::Forward => (2 * 2 * size + 2 * 2 * size, 3),
        Pass::BackwardInput | Pass::BackwardWeight => {
            let compared = 3 * (size + flag) + 3 * flag;
            let selected = 2 * (2 * size + flag);
            (compared + selected + 2 * 2 * size, 7)
        }
    };
    Some(Chain {
        bytes: Bytes(elements * bytes),
        launches,
    })
}

fn is_bounded(operator: Operator) -> bool {
    matches!(
        operator,
        Operator::Pointwise(
            Pointwise::Gated(GatedUnit::Bounded(_)) | Pointwise::FusedGated(GatedUnit::Bounded(_))
        )
    )
}

/// Whether an activation function reads the result of adding this bias. It does for the bias of an expert's first matrix
/// product.
fn feeds_activation(trace: &Trace, op: &AnyOp<'_>) -> bool {
    let forward = match op.pass {
        Pass::Forward => Some(op.index),
        Pass::BackwardInput | Pass::BackwardWeight => match trace.backward[op.index].operator {
            Gradient::Expert(forward, _) => Some(forward),
            _ => None,
        },
    };
    let output = forward.map(|index| trace.forward[index].outputs[0]);
    let reads = |of: &dtensor::Op| {
        matches!(of.operator, Operator::Pointwise(_))
            && output.is_some_and(|output| of.inputs.contains(&output))
    };
    trace.forward.iter().any(reads)
}

/// Number of experts whose products a rank computes.
fn local_experts(trace: &Trace) -> u64 {
    let groups = trace.forward.iter().filter_map(|op| match op.operator {
        Operator::Product(Product::GroupedMatmul(_, groups)) => Some(groups),
        _ => None,
    });
    groups.max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use catalog::runtime::Rewrite;
    use catalog::{DType, Dispatcher, Runtime};
    use models::BlockLayout;

    use super::*;
    use crate::lower::kernel::{Kernel, KernelKind};
    use crate::lower::testing::{self, lowered, runtime};

    /// A layer with eight experts, run on 64 tokens, each of which goes to two of them. Experts are as wide as the model.
    fn layer() -> Trace {
        let json = r#"{"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 32}"#;
        let model = catalog::hf::decode(json, "test", "test").expect("a model");
        testing::layer(&model, &BlockLayout::alone(1, 64, DType::Bf16))
    }

    /// For each kernel of the operators that `is` selects, the bytes that it moves per element of the experts' rows, and its
    /// launches: of the forward pass, and of the backward pass.
    fn of(runtime: &Runtime, is: fn(Operator) -> bool) -> [Vec<(u64, u32)>; 2] {
        let trace = layer();
        let lowered = lowered(runtime, &trace);
        let moved = |kernels: &[Kernel]| {
            let is = |kernel: &&Kernel| is(trace.op(kernel.pass, kernel.op).operator);
            let memory = kernels.iter().filter(is);
            let sizes = memory.map(|kernel| match kernel.kind {
                KernelKind::Memory {
                    bytes, launches, ..
                } => (bytes.0 / (64 * 2 * 64), launches),
                _ => unreachable!("bound by memory"),
            });
            sizes.collect()
        };
        [moved(&lowered.forward), moved(&lowered.backward)]
    }

    const APART: &str = "megatron-core";

    #[test]
    fn the_last_bias_of_experts_is_a_chain_of_operators_where_experts_run_apart() {
        let is = |operator: Operator| operator == Operator::Expert(Expert::Bias);
        let mut runtime = runtime(APART);
        // For each of eight experts a product and a sum; in backward a cast, two products and their sums.
        for (dispatcher, [expected, gradient]) in [
            (Dispatcher::HybridEp, [(28, 18), (40, 42)]),
            (Dispatcher::AllToAll, [(12, 17), (16, 33)]),
        ] {
            runtime.dispatcher = dispatcher;
            let [forward, backward] = of(&runtime, is);
            assert_eq!(forward.last(), Some(&expected));
            assert_eq!(backward, [gradient]);
        }
        runtime.rewrites.remove(&Rewrite::LaunchExpertsApart);
        let [forward, backward] = of(&runtime, is);
        assert_eq!(forward.last(), Some(&(4, 1)));
        assert!(backward.iter().all(|&(_, launches)| launches == 1));
    }

    #[test]
    fn bounds_of_gated_activations_are_operators_beside_the_fused_activation() {
        // Forward's activation shares a kernel with the bias before it.
        let bias = |operator: Operator| operator == Operator::Expert(Expert::Bias);
        let bounded = |operator: Operator| is_bounded(operator);
        let mut runtime = runtime(APART);
        let both = |runtime: &Runtime| {
            let ([forward, _], [_, backward]) = (of(runtime, bias), of(runtime, bounded));
            [forward[forward.len() - 2], backward[0]]
        };
        let apart = both(&runtime);
        runtime.rewrites.remove(&Rewrite::LaunchExpertsApart);
        let fused = both(&runtime);
        let beyond =
            [0, 1].map(|pass| (apart[pass].0 - fused[pass].0, apart[pass].1 - fused[pass].1));
        assert_eq!(beyond, [(16, 3), (30, 7)]);
    }
}
