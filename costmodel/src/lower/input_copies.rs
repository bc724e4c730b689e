//! Copies that column-parallel linear layers make of their inputs. PaddlePaddle's layers call an operator whose backward sums the
//! gradient of the input over tensor-parallel ranks; its forward copies the input (PaddlePaddle 2.5, `mpu/mp_ops.py`, `_c_identity`;
//! `c_identity_op.h`, `CIdentityOpKernel`). Layers that read the same tensor each keep their own copy, and none keeps that tensor.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{Op, Operator, Pass, Product, TensorId, Trace};

use super::kernel::{Chain, Kernel};
use super::lowering::Lowering;

/// Bytes of the copy of its input that a column-parallel linear layer keeps instead of the input. `None` if the operator is no such
/// layer, or makes or keeps no copy.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    copied(lowering, trace, op).filter(|_| op.saved.contains(&op.inputs[0]))
}

/// The kernel that copies the input of a column-parallel linear layer before the layer's product.
pub(super) fn before(lowering: &Lowering<'_>, trace: &Trace, product: &Kernel) -> Option<Kernel> {
    if product.pass != Pass::Forward {
        return None;
    }
    let bytes = copied(lowering, trace, &trace.forward[product.op])?;
    Some(product.beside(Chain {
        bytes: bytes * 2,
        launches: 1,
    }))
}

/// Bytes of the copy that a column-parallel linear layer makes of its input. `None` if the operator is no such layer or makes no
/// copy: sequences that are gathered are a tensor of their own already.
fn copied(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let (Operator::Product(Product::Matmul(..)), &[input, weight, ..]) =
        (op.operator, op.inputs.as_slice())
    else {
        return None;
    };
    let copies = lowering.has(Rewrite::ReducePerLinear)
        && has_part_of_rows(trace, weight)
        && !is_gathered(trace, input);
    copies.then(|| trace.tensor(input).bytes())
}

/// Whether each rank has some rows of a weight, that is, computes some columns of the product.
fn has_part_of_rows(trace: &Trace, weight: TensorId) -> bool {
    let weight = trace.tensor(weight);
    weight.shape.first() < weight.global.first()
}

fn is_gathered(trace: &Trace, id: TensorId) -> bool {
    let exchanges =
        |op: &Op| matches!(op.operator, Operator::Exchange(_)) && op.outputs.contains(&id);
    trace.forward.iter().any(exchanges)
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::BlockLayout;
    use plans::Recompute;

    use super::*;
    use crate::lower::KernelKind;
    use crate::lower::testing::{HIDDEN, TOKENS, layer, lowered, model, runtime};

    /// Names of what a layer of Llama keeps of the inputs of its linear layers, without other tensors, each with its bytes.
    fn inputs(of_runtime: &str, tp: u64, sequence_parallel: bool) -> Vec<(String, u64)> {
        let layout = BlockLayout {
            tp,
            sequence_parallel,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let trace = layer(&model("llama", ""), &layout);
        let runtime = runtime(of_runtime);
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let saved = lowering.saved(&trace, Recompute::None).into_iter();
        let of_input = |name: &str| name.ends_with(".input") || name.ends_with("norm.output");
        saved
            .filter(|(name, _)| of_input(name))
            .map(|(name, bytes)| (name, bytes.0))
            .collect()
    }

    #[test]
    fn column_parallel_layers_keep_copies_of_what_they_share() {
        let copies = |tp| inputs("paddle", tp, false);
        let whole = 2 * TOKENS * HIDDEN;
        let five = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
        let found = copies(2);
        let all = found.iter().all(|(name, bytes)| {
            *bytes == whole && five.iter().any(|of| name.contains(&format!("{of}.input")))
        });
        assert!(all && found.len() == five.len(), "{found:?}");
        assert_eq!(copies(1).len(), 2, "{:?}", copies(1));
        let gathered = inputs("paddle", 2, true);
        assert!(
            !gathered
                .iter()
                .any(|(name, _)| name.contains("q_proj.input"))
        );
        assert_eq!(inputs("megatron-2022", 2, false).len(), 2);
    }

    #[test]
    fn a_kernel_copies_the_input_of_each_column_parallel_layer() {
        let bytes = |tp| {
            let layout = BlockLayout {
                tp,
                ..BlockLayout::alone(1, TOKENS, DType::Bf16)
            };
            let trace = layer(&model("llama", ""), &layout);
            let lowered = lowered(&runtime("paddle"), &trace);
            let copies = lowered.forward.iter().filter(|kernel| {
                let product = matches!(trace.forward[kernel.op].operator, Operator::Product(_));
                product && matches!(kernel.kind, KernelKind::Memory { .. })
            });
            let bytes = copies.map(|kernel| match kernel.kind {
                KernelKind::Memory { bytes, .. } => bytes.0,
                other => panic!("{other:?}"),
            });
            bytes.collect::<Vec<_>>()
        };
        // Each reads and writes 16 bits.
        assert_eq!(bytes(2), [2 * 2 * TOKENS * HIDDEN; 5]);
        assert!(bytes(1).is_empty());
    }
}
