//! What PyTorch's elementary operators move in a model that runs under `torch.autocast`. The trace gives every activation 16 bits,
//! but norms and the residual stream have 32 (see `autocast`):
//! - Every linear layer casts its input to 16 bits, also where several read the same norm. Its input's gradient is cast back.
//! - Where a branch joins the stream, the sum is written in 32 bits. The branch's gradient is cast to 16.
//! - Cosines and sines have the stream's type, so queries and keys are rotated in 32 bits, and attention casts them back
//!   (transformers `apply_rotary_pos_emb`).
//!
//! The numbers count the operators that PyTorch 2.15 dispatches for one layer of transformers 5.24, Llama's and GPT-2's.

use catalog::Bytes;
use catalog::model::NormKind;
use catalog::runtime::Rewrite;
use dtensor::{
    AnyOp, CostClass, Gradient, Norm, Op, Operator, Pass, Pointwise, Product, TensorId, TensorRole,
    Trace,
};

use super::kernel::Chain;
use super::lowering::Lowering;

/// Bytes of a number in 32 bits and of one in 16.
const WIDE: u64 = 4;
const NARROW: u64 = 2;
/// Bytes that a cast from one to the other moves for each number.
const CAST: u64 = WIDE + NARROW;

/// The elementary operators of a norm, an addition or a rotary embedding, or of its gradient. `None` if autocast does not change
/// what they move, or a compiler fuses them.
pub(super) fn chain(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    let of = trace.tensor(*op.outputs.first()?);
    if !lowering.autocasts(of.dtype) || lowering.has(Rewrite::FusePointwise) {
        return None;
    }
    let backward = op.pass != Pass::Forward;
    let (bytes, launches) = match op.cost() {
        CostClass::Norm => norm(lowering, trace, op)?,
        CostClass::Add => sum(trace, op)?,
        CostClass::Rope if !lowering.has(Rewrite::FuseRope) => rope(backward),
        _ => return None,
    };
    Some(Chain {
        bytes: Bytes(of.elements() * bytes),
        launches,
    })
}

/// Bytes for each element, and launches, of a norm of the residual stream. `None` if the norm reads something else.
fn norm(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<(u64, u32)> {
    let kind = match op.operator {
        Operator::Norm(Norm { kind, .. }) => kind,
        Operator::Pointwise(Pointwise::UnitNorm { .. }) => NormKind::RmsNorm,
        _ => return None,
    };
    let forward = match op.pass {
        Pass::Forward => &trace.forward[op.index],
        _ => forward_of(trace, op)?,
    };
    if !is_wide(trace, forward.inputs[0]) {
        return None;
    }
    let by_operators = kind == NormKind::RmsNorm
        && lowering.has(Rewrite::NormInF32)
        && !lowering.has(Rewrite::FuseNorm);
    let casts = linears(trace, forward.outputs[0]);
    let (bytes, launches) = match (op.pass, by_operators) {
        // Square, mean, product with the inverse of the root, product with the weight.
        (Pass::Forward, true) => (7 * WIDE, 6),
        (Pass::Forward, false) => (2 * WIDE, 1),
        // Of what each of these operators reads and writes, and of the sums over rows and over tokens.
        (_, true) => (23 * WIDE + CAST, 12),
        // The gradient of the input reads two tensors and writes one; those of the parameters read both again.
        (_, false) => (5 * WIDE + CAST, 3),
    };
    Some((bytes + casts * CAST, launches + casts as u32))
}

/// Bytes for each element, and launches, of a branch that joins the residual stream, or of a sum of two gradients of a wide tensor.
fn sum(trace: &Trace, op: &AnyOp<'_>) -> Option<(u64, u32)> {
    if op.pass != Pass::Forward {
        return Some((3 * WIDE, 1));
    }
    let joins = op.inputs.iter().any(|&input| is_wide(trace, input));
    joins.then_some((2 * WIDE + NARROW, 1))
}

/// Bytes for each element, and launches, of a rotary embedding of halves, or of its gradient.
fn rope(backward: bool) -> (u64, u32) {
    match backward {
        // Half is negated, and both halves are put together again: in 16 bits. Two products and a sum, then the cast for attention.
        false => (3 * NARROW + 2 * CAST + 3 * WIDE + CAST, 6),
        // The cast's gradient, two products with a cast each, the halves written into zeros, two sums.
        true => (
            CAST + 2 * (2 * WIDE + CAST) + 4 * NARROW + 2 * 3 * NARROW,
            10,
        ),
    }
}

/// The forward operator whose gradient a backward operator computes.
fn forward_of<'t>(trace: &'t Trace, op: &AnyOp<'_>) -> Option<&'t Op> {
    match trace.backward[op.index].operator {
        Gradient::Norm(of, _) | Gradient::Pointwise(of, _) => Some(&trace.forward[of]),
        _ => None,
    }
}

/// Whether a tensor of forward has 32 bits: the residual stream, and what norms make of it.
fn is_wide(trace: &Trace, id: TensorId) -> bool {
    if trace.tensor(id).role == TensorRole::Input {
        return true;
    }
    let Some(producer) = trace.forward.iter().find(|op| op.outputs.contains(&id)) else {
        return false;
    };
    match producer.operator.cost() {
        CostClass::Embedding | CostClass::Norm => true,
        CostClass::Add | CostClass::Dropout => {
            producer.inputs.iter().any(|&input| is_wide(trace, input))
        }
        _ => false,
    }
}

/// How many linear layers read a tensor.
fn linears(trace: &Trace, id: TensorId) -> u64 {
    let reads = |op: &&Op| {
        matches!(op.operator, Operator::Product(Product::Matmul(..))) && op.inputs[0] == id
    };
    trace.forward.iter().filter(reads).count() as u64
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::{BlockClass, BlockLayout};

    use super::*;

    /// Bytes of each operator that autocast changes, for each of its output's numbers: of a layer's forward, then of its backward.
    fn bytes(model: &str, runtime: &str) -> [Vec<u64>; 2] {
        let model = catalog::load::model(model).expect("a preset");
        let class = BlockClass::Layer(model.layer_class(0));
        let trace = models::trace_block(&model, class, &BlockLayout::alone(1, 32, DType::Bf16));
        let trace = trace.expect("a block");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let of = |op: AnyOp<'_>| {
            let chain = chain(&lowering, &trace, &op)?;
            Some(chain.bytes.0 / trace.tensor(op.outputs[0]).elements())
        };
        [
            trace.forward_ops().filter_map(of).collect(),
            trace.backward_ops().filter_map(of).collect(),
        ]
    }

    /// Llama's three projections read one norm, gate and up the other; their gradients are summed, and so are those of the stream.
    #[test]
    fn the_residual_stream_has_32_bits() {
        let llama = [
            vec![28 + 3 * 6, 36, 36, 10, 28 + 2 * 6, 10],
            vec![12, 92 + 6 + 2 * 6, 12, 54, 54, 12, 12, 92 + 6 + 3 * 6, 12],
        ];
        assert_eq!(bytes("llama3-8b", "hf-trainer"), llama);
        let gpt2 = [
            vec![8 + 6, 10, 8 + 6, 10],
            vec![20 + 6 + 6, 12, 20 + 6 + 6, 12],
        ];
        assert_eq!(bytes("gpt2", "hf-trainer"), gpt2);
    }

    #[test]
    fn nothing_changes_without_autocast() {
        for runtime in ["hf-deepspeed", "torchtitan-compile", "megatron-core"] {
            let changed = bytes("llama3-8b", runtime).concat();
            assert!(changed.is_empty(), "{runtime}: {changed:?}");
        }
    }
}
