//! A GELU by tanh that PyTorch runs as a chain of elementary operators, each a kernel of its own, as in
//! `0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))` (transformers, `NewGELUActivation`).
//!
//! Under `torch.autocast` the power runs in 32 bits (PyTorch's `autocast_mode.h` lists the operators that do), and so does
//! everything that is computed from it, until the next linear layer casts its input back.

use catalog::model::Activation;
use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{AnyOp, Nonlinearity, Op, Operator, Pass, Pointwise, Trace};

use super::kernel::Chain;
use super::lowering::Lowering;

/// Bytes of memory traffic, and bytes kept for backward, for each element of a GELU's input.
#[derive(Clone, Copy, Debug)]
struct PerElement {
    /// Bytes read and written by all kernels of forward.
    forward: u64,
    /// Bytes read and written by all kernels of backward.
    backward: u64,
    /// Bytes kept from forward to backward, in addition to the input.
    kept: u64,
}

impl PerElement {
    /// The bytes for an input of type `dtype`.
    fn new(lowering: &Lowering<'_>, dtype: DType) -> Self {
        let (narrow, wide) = (dtype.size(), DType::F32.size());
        if lowering.autocasts(dtype) {
            let cast = narrow + wide;
            let power_backward = 2 * wide + 2 * wide + 3 * wide;
            Self {
                // Half the input; a cast and the power; a product; the sum with the input; a product, the tanh, one more;
                // the product with the half; a cast.
                forward: 2 * narrow
                    + (cast + 2 * wide)
                    + 2 * wide
                    + (narrow + 2 * wide)
                    + 3 * 2 * wide
                    + (narrow + 2 * wide)
                    + cast,
                // A cast; the gradients of both factors, one of them cast; tanh; a product; a cast of the input's gradient
                // and a product of the power's; the power, cast; the half; two sums of gradients of the input.
                backward: cast
                    + (3 * wide + cast)
                    + (2 * wide + narrow)
                    + 3 * wide
                    + 2 * wide
                    + (cast + 2 * wide)
                    + (power_backward + cast)
                    + 2 * narrow
                    + 2 * 3 * narrow,
                // The input in 32 bits instead of 16, half of the input, tanh, and 1 + tanh.
                kept: (wide - narrow) + narrow + 2 * wide,
            }
        } else {
            Self {
                forward: 18 * narrow,
                backward: 28 * narrow,
                // Half of the input, tanh, and 1 + tanh.
                kept: 3 * narrow,
            }
        }
    }
}

/// Whether an operator is a GELU for which the runtime launches a chain of elementary operators instead of one kernel.
fn is_split(lowering: &Lowering<'_>, operator: Operator) -> bool {
    let is_split = |of: Nonlinearity| of.tanh && of.function == Activation::Gelu;
    lowering.has(Rewrite::GeluByOperators)
        && matches!(operator, Operator::Pointwise(Pointwise::Activation(of)) if is_split(of))
}

/// The elementary operators that compute a GELU, or its gradient: how many kernels they are and what all of them move. `None` if
/// the operator is no GELU, or one kernel computes it.
pub(super) fn chain(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    if !is_split(lowering, op.operator) {
        return None;
    }
    let of = trace.tensor(op.outputs[0]);
    let bytes = PerElement::new(lowering, of.dtype);
    let casts = lowering.autocasts(of.dtype);
    let (bytes, launches) = match (op.pass, casts) {
        (Pass::Forward, false) => (bytes.forward, 8),
        (Pass::Forward, true) => (bytes.forward, 10),
        (Pass::BackwardInput | Pass::BackwardWeight, false) => (bytes.backward, 11),
        (Pass::BackwardInput | Pass::BackwardWeight, true) => (bytes.backward, 15),
    };
    Some(Chain {
        bytes: Bytes(of.elements() * bytes),
        launches,
    })
}

/// Bytes that the elementary operators of a GELU keep for backward in addition to its input. `None` if the operator is no GELU, or
/// one kernel computes it.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    if !is_split(lowering, op.operator) {
        return None;
    }
    let of = trace.tensor(op.outputs[0]);
    let kept = PerElement::new(lowering, of.dtype).kept;
    Some(Bytes(of.elements() * kept))
}

#[cfg(test)]
mod tests {
    use dtensor::CostClass;

    use super::*;
    use crate::lower::kernel::{Kernel, KernelKind};
    use crate::lower::testing::layer_of;

    #[test]
    fn operators_beyond_a_power_run_in_32_bits_under_autocast() {
        let trace = layer_of("gpt2");
        let gelu = |op: &AnyOp<'_>| op.cost() == CostClass::Activation { gated: false };
        // Bytes and launches of forward and backward, and bytes kept, of an element of 16 bits.
        let cases = [
            ("hf-deepspeed", [(36, 8), (56, 11)], Some(6)),
            ("hf-trainer", [(76, 10), (118, 15)], Some(12)),
            ("fsdp2", [(4, 1), (6, 1)], None),
        ];
        for (runtime, expected, kept_by_all) in cases {
            let runtime = catalog::load::runtime(runtime).expect("a preset");
            let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
            let lowered = lowering.lower(&trace);
            let forward = trace.forward_ops().find(gelu).expect("a GELU");
            let backward = trace.backward_ops().find(gelu).expect("its backward");
            let elements = trace.tensor(forward.outputs[0]).elements();
            let of = |kernels: &[Kernel], op: &AnyOp<'_>| {
                let kernel = kernels.iter().find(|kernel| kernel.op == op.index);
                match kernel.expect("a kernel").kind {
                    KernelKind::Memory {
                        bytes, launches, ..
                    } => (bytes.0 / elements, launches),
                    _ => panic!("not bound by memory"),
                }
            };
            let moved = [
                of(&lowered.forward, &forward),
                of(&lowered.backward, &backward),
            ];
            assert_eq!(moved, expected, "{}", runtime.name);
            let ops = trace.forward.iter();
            let kept: Option<Bytes> = ops.filter_map(|op| kept(&lowering, &trace, op)).next();
            assert_eq!(kept, kept_by_all.map(|each| Bytes(each * elements)));
        }
    }
}
