//! How many bytes PyTorch's elementary operators read and write in a model that runs under `torch.autocast`. In the trace all
//! activations have 16 bits. Under autocast the residual stream and the results of norms have 32 (see `autocast`), which costs more:
//! - Every linear layer casts its input to 16 bits, even if another layer has cast the same tensor. In backward the gradient of the
//!   input is cast to 32 bits.
//! - Attention and feed-forward blocks return 16 bits, which are added to the stream in 32. In backward their gradient is cast to 16.
//! - Rotary embedding multiplies queries and keys by cosines and sines of 32 bits, so the results have 32 bits. Attention casts them
//!   back to 16 (transformers `apply_rotary_pos_emb`).
//! - Norms of queries and keys cast their 16-bit input to 32 bits. In backward the gradient of that input is cast to 16 bits.
//!
//! - An adapter of 32 bits casts its input to 32 bits, and autocast casts that back to 16. In backward the gradient is cast the same way.
//!   Dropout between both casts has 32 bits (PEFT 0.21, `tuners/lora/layer.py`, `Linear.forward`).
//!
//! FSDP may gather parameters in 16 bits. Then the residual stream has 16 bits too, and only LayerNorm computes in 32.
//!
//! The numbers count the operators that PyTorch 2.15 dispatches for one layer of transformers 5.24, of Llama, Qwen3 and GPT-2.

use catalog::Bytes;
use catalog::model::NormKind;
use catalog::runtime::Rewrite;
use dtensor::{AnyOp, CostClass, Gradient, Norm, Op, Operator, Pass, TensorId, TensorRole, Trace};

use super::autocast;
use super::kernel::{Chain, Kernel, WIDE};
use super::lowering::Lowering;

/// Bytes of a 16-bit number.
const NARROW: u64 = 2;
/// Bytes that are read and written to cast one number from 32 bits to 16, or from 16 to 32.
const CAST: u64 = WIDE + NARROW;

/// Bytes that the elementary operators of a norm, addition or rotary embedding, or of its gradient,
/// move together, and their number. `None` if autocast changes nothing, or a compiler fuses them.
pub(super) fn chain(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    let of = trace.tensor(*op.outputs.first()?);
    if !lowering.autocasts(of.dtype) || lowering.has(Rewrite::FusePointwise) {
        return None;
    }
    let wide_stream = lowering.widens_stream(of.dtype);
    let (bytes, launches) = match op.cost() {
        CostClass::Norm => norm(lowering, trace, op)?,
        CostClass::Add if wide_stream => sum(trace, op)?,
        CostClass::Rope if wide_stream && !lowering.fuses_rope(op.operator) => rope(trace, op),
        _ => return None,
    };
    Some(Chain {
        bytes: Bytes(of.elements() * bytes),
        launches,
    })
}

/// The casts of an adapter's input that PEFT and autocast make before the adapter's first product, or those of its gradient after the
/// product's gradient, with what dropout between them moves in 32 bits beyond its traffic in 16. `None` for other products.
pub(super) fn of_adapter(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    product: &Kernel,
) -> Option<Kernel> {
    let cast = match op.pass {
        Pass::Forward => op.inputs[0],
        Pass::BackwardInput => op.outputs[0],
        Pass::BackwardWeight => return None,
    };
    let forward = forward_of(trace, op)?;
    if lowering.has(Rewrite::FusePointwise)
        || !autocast::casts_for_adapter(lowering, trace, forward)
    {
        return None;
    }
    let dropout = match autocast::dropout_before(trace, forward) {
        Some(_) => 2 * (WIDE - NARROW),
        None => 0,
    };
    Some(product.beside(Chain {
        bytes: Bytes(trace.tensor(cast).elements() * (2 * CAST + dropout)),
        launches: 2,
    }))
}

/// Bytes that a norm, or its gradient, reads and writes for each element, and its number of kernels. `None` if these are the same
/// without autocast.
fn norm(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<(u64, u32)> {
    let forward = forward_of(trace, op)?;
    let Operator::Norm(Norm { kind, .. }) = forward.operator else {
        return None;
    };
    let input = forward.inputs[0];
    let wide_stream = lowering.widens_stream(trace.tensor(input).dtype);
    if kind == NormKind::RmsNorm && !wide_stream {
        return None;
    }
    let by_operators = kind == NormKind::RmsNorm
        && lowering.has(Rewrite::NormInF32)
        && !lowering.has(Rewrite::FuseNorm);
    let wide = wide_stream && is_wide(trace, input);
    let casts = autocast::readers(trace, forward.outputs[0]);
    let (bytes, launches) = match (op.pass, by_operators, wide) {
        // Square, mean, inverse of the root, product with it, product with the weight.
        (Pass::Forward, true, true) => (7 * WIDE, 6),
        // The same between a cast to 32 bits and one to 16, and the product of 16 bits with a weight of 32.
        (Pass::Forward, true, false) => (5 * WIDE + 3 * CAST, 8),
        (Pass::Forward, false, true) => (2 * WIDE, 1),
        (Pass::Forward, false, false) => (2 * WIDE + CAST, 2),
        // The gradients of these operators, with sums over rows and over tokens. The cast is of the
        // gradient of the branch that joined the stream before this norm.
        (_, true, true) => (23 * WIDE + CAST, 12),
        (_, true, false) => (21 * WIDE + 4 * CAST, 14),
        // The gradient of the input reads two tensors and writes one; those of the parameters read both again.
        (_, false, _) => (5 * WIDE + CAST, 3),
    };
    Some((bytes + casts * CAST, launches + casts as u32))
}

/// Bytes that an addition reads and writes for each element, and its number of kernels: in forward, of a block's result to the
/// residual stream; in backward, of two gradients of a tensor of 32 bits. `None` for other additions.
fn sum(trace: &Trace, op: &AnyOp<'_>) -> Option<(u64, u32)> {
    if op.pass != Pass::Forward {
        return Some((3 * WIDE, 1));
    }
    let joins = op.inputs.iter().any(|&input| is_wide(trace, input));
    joins.then_some((2 * WIDE + NARROW, 1))
}

/// Bytes that a rotary embedding, or its gradient, reads and writes for each element, and its number of kernels. Each entry in the
/// first half of a head is rotated with one in the second half.
fn rope(trace: &Trace, op: &AnyOp<'_>) -> (u64, u32) {
    // Queries and keys have 16 bits, unless a norm returned them in 32.
    let wide = reads_wide(trace, op);
    let (entry, product) = if wide {
        (WIDE, 2 * WIDE)
    } else {
        (NARROW, CAST)
    };
    match op.pass {
        // Half is negated, and both halves are put together again. Two products and a sum, then the cast for attention.
        Pass::Forward => (3 * entry + 2 * product + 3 * WIDE + CAST, 6),
        // The cast's gradient, two products, with a cast each to 16 bits, the halves written into zeros, two sums.
        _ => {
            let (casts, launches) = if wide { (0, 8) } else { (2 * CAST, 10) };
            (
                CAST + 2 * 2 * WIDE + casts + 4 * entry + 2 * 3 * entry,
                launches,
            )
        }
    }
}

/// Whether an operator of forward reads a tensor of 32 bits. For an operator of backward: whether the operator whose gradient it
/// computes does. The residual stream is taken to have 32 bits.
pub(super) fn reads_wide(trace: &Trace, op: &AnyOp<'_>) -> bool {
    let input = forward_of(trace, op).and_then(|forward| forward.inputs.first());
    input.is_some_and(|&input| is_wide(trace, input))
}

/// For an operator of forward, the operator itself. For one of backward, the operator of forward whose gradient it computes.
fn forward_of<'t>(trace: &'t Trace, op: &AnyOp<'_>) -> Option<&'t Op> {
    if op.pass == Pass::Forward {
        return Some(&trace.forward[op.index]);
    }
    match trace.backward[op.index].operator {
        Gradient::Norm(of, _) | Gradient::Pointwise(of, _) | Gradient::Product(of, ..) => {
            Some(&trace.forward[of])
        }
        _ => None,
    }
}

/// Whether a tensor of forward has 32 bits under autocast: it belongs to the residual stream, or a norm returned it. The residual
/// stream is taken to have 32 bits.
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

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::BlockLayout;

    use super::*;
    use crate::execution::Execution;
    use crate::lower::KernelKind;
    use crate::lower::testing::{self, HIDDEN, INNER, TOKENS, layer_of};

    /// Bytes of each operator that autocast changes, for each of its output's numbers: of a layer's forward, then of its backward.
    fn bytes(model: &str, runtime: &str, narrow_parameters: bool) -> [Vec<u64>; 2] {
        let trace = layer_of(model);
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let execution = Execution {
            narrow_parameters,
            ..Execution::own(&runtime)
        };
        let lowering = Lowering::of(&runtime, &execution);
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
        assert_eq!(bytes("llama3-8b", "hf-trainer", false), llama);
        let gpt2 = [
            vec![8 + 6, 10, 8 + 6, 10],
            vec![20 + 6 + 6, 12, 20 + 6 + 6, 12],
        ];
        assert_eq!(bytes("gpt2", "hf-trainer", false), gpt2);
    }

    /// Queries and keys have 16 bits before their norms and 32 after.
    #[test]
    fn norms_of_queries_and_keys_cast_them() {
        let [forward, backward] = bytes("qwen3-8b", "hf-trainer", false);
        let ours = [38, 38, 46, 46];
        assert!(forward.windows(4).any(|w| w == ours), "{forward:?}");
        for of in [62, 108] {
            assert_eq!(backward.iter().filter(|&&bytes| bytes == of).count(), 2);
        }
    }

    /// Autocast runs LayerNorm in 32 bits whatever it reads. Linear layers cast what it returns.
    #[test]
    fn with_parameters_of_16_bits_only_layer_norms_change() {
        let llama = bytes("llama3-8b", "hf-trainer", true).concat();
        assert!(llama.is_empty(), "{llama:?}");
        let gpt2 = [vec![14 + 6, 14 + 6], vec![20 + 6 + 6, 20 + 6 + 6]];
        assert_eq!(bytes("gpt2", "hf-trainer", true), gpt2);
    }

    #[test]
    fn nothing_changes_without_autocast() {
        for runtime in ["hf-deepspeed", "torchtitan-compile", "megatron-core"] {
            let changed = bytes("llama3-8b", runtime, false).concat();
            assert!(changed.is_empty(), "{runtime}: {changed:?}");
        }
    }

    /// Bytes of the casts that adapters of 32 bits add, for each number that their layers read. Six layers read the residual stream's width,
    /// the last the feed-forward block's. There are two casts in each direction; dropout between them has 4 bytes for 2, twice.
    #[test]
    fn adapters_of_32_bits_cast_what_they_read() {
        let model = testing::model("llama", "");
        let [runtime, compiled] = ["hf-trainer", "hf-trainer"].map(testing::runtime);
        let mut compiled = compiled;
        compiled.rewrites.insert(Rewrite::FusePointwise);
        for (runtime, adapters, bytes) in [
            (&runtime, "rank=4", 2 * 6),
            (&runtime, "rank=4,dropout=0.1", 2 * 6 + 2 * 2),
            (&compiled, "rank=4", 0),
        ] {
            let adapters = Some(adapters.parse().expect("adapters"));
            let model = model.clone().with_adapters(adapters).expect("a model");
            let layout = BlockLayout::alone(1, TOKENS, DType::Bf16);
            let trace = testing::layer(&model, &layout);
            let passes = [false, true].map(|wide_adapters| {
                let execution = Execution {
                    narrow_parameters: true,
                    wide_adapters,
                    ..Execution::own(runtime)
                };
                let lowered = Lowering::of(runtime, &execution).lower(&trace);
                [lowered.forward, lowered.backward].map(moved)
            });
            let read = TOKENS * (6 * HIDDEN + INNER);
            let launches = if bytes > 0 { 7 * 2 } else { 0 };
            for (narrow, wide) in passes[0].into_iter().zip(passes[1]) {
                let more = (
                    wide.bytes.0 - narrow.bytes.0,
                    wide.launches - narrow.launches,
                );
                assert_eq!(more, (bytes * read, launches), "{adapters:?}");
            }
        }
    }

    /// Bytes and launches of all kernels that memory bounds.
    fn moved(kernels: Vec<Kernel>) -> Chain {
        let of = |kernel: &Kernel| match kernel.kind {
            KernelKind::Memory {
                bytes, launches, ..
            } => Some(Chain { bytes, launches }),
            _ => None,
        };
        kernels.iter().filter_map(of).sum()
    }
}
