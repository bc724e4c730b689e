//! Kernels for the softmax of attention scores, in runtimes whose attention is not a single kernel.

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{AnyOp, AttentionShape, Pass, Trace};

use super::kernel::{Chain, KernelKind, traffic};
use super::lowering::Lowering;
use crate::price::MemoryKind;

/// Largest number of keys that Megatron's fused softmax kernel supports (Megatron-LM@9200e43, `fused_softmax.py`, `is_kernel_available`).
const MOST_KEYS: u64 = 4096;

/// The kernels that scale, mask and normalise attention scores, or those that compute the gradient of this. A fused softmax is one
/// kernel; otherwise each of the steps is one.
pub(super) fn kernels(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    shape: AttentionShape,
) -> KernelKind {
    let scores = trace.tensor(op.inputs[0]);
    let all = traffic(trace, op.inputs, op.outputs);
    let narrow = scores.dtype.size() < DType::F32.size();
    let steps = |bytes, launches| Chain { bytes, launches };
    let chain = if lowering.has(Rewrite::FusePointwise) {
        steps(all, 1)
    } else if narrow && lowering.has(Rewrite::FuseScaledMaskedSoftmax) {
        if takes(shape) {
            steps(moved_by_fused(trace, op, shape), 1)
        } else {
            in_32_bits(scores.elements(), scores.dtype, DType::F32, op.pass)
        }
    } else if lowering.autocasts(scores.dtype) {
        in_32_bits(scores.elements(), scores.dtype, scores.dtype, op.pass)
    } else {
        steps(all * 3, 3)
    };
    chain.bound_by_memory(MemoryKind::Softmax)
}

/// Whether Megatron's fused softmax kernel supports this shape. It requires that the number of queries, the number of keys, and
/// the number of sequences times heads are multiples of four (`is_kernel_available`, as for [`MOST_KEYS`]).
fn takes(shape: AttentionShape) -> bool {
    let multiples = [shape.q_len, shape.kv_len, shape.batch * shape.heads];
    multiples.iter().all(|count| count % 4 == 0) && (17..=MOST_KEYS).contains(&shape.kv_len)
}

/// Bytes that Megatron's fused softmax kernel reads and writes. With a causal mask it reads only the lower triangle of its inputs,
/// which is half of them, and writes all of its output, with zeros above the diagonal (`scaled_upper_triang_masked_softmax.h`).
fn moved_by_fused(trace: &Trace, op: &AnyOp<'_>, shape: AttentionShape) -> Bytes {
    let read = traffic(trace, op.inputs, &[]);
    let written = traffic(trace, &[], op.outputs);
    let triangle = shape.causal && shape.q_len == shape.kv_len;
    Bytes(if triangle { read.0 / 2 } else { read.0 }) + written
}

/// The kernels of a softmax in 32 bits whose scores and probabilities have the type `narrow`. There are five in forward: scale, mask,
/// a cast to 32 bits, the softmax, and a cast back. Backward has five too, one for the gradient of each. `before` is the type in
/// which scale and mask are computed:
/// - `narrow` under `torch.autocast`, which runs only the softmax in 32 bits (the fp32 list in PyTorch's `autocast_mode.h`; the
///   model is that of transformers 4.12, `GPT2Attention._attn`);
/// - 32 bits in Megatron-LM where the fused kernel does not support the shape: by default (`apply_query_key_layer_scaling`) it casts
///   first.
fn in_32_bits(elements: u64, narrow: DType, before: DType, pass: Pass) -> Chain {
    let (narrow, before, wide) = (narrow.size(), before.size(), DType::F32.size());
    let of_softmax = if pass == Pass::Forward { 2 } else { 3 };
    let bytes = 2 * 2 * before + 2 * (narrow + wide) + of_softmax * wide;
    Chain {
        bytes: Bytes(elements * bytes),
        launches: 5,
    }
}

#[cfg(test)]
mod tests {
    use models::BlockLayout;

    use super::*;
    use crate::lower::Kernel;
    use crate::lower::testing::{self, layer, lowered};

    /// Bytes and launches of the softmaxes of forward and backward of a layer whose heads have 64 dimensions.
    fn softmaxes(runtime: &str, sequences: u64, tokens: u64, heads: u64) -> Vec<(u64, u32)> {
        let json = format!(
            r#"{{"model_type": "gpt2", "n_embd": {}, "n_layer": 1, "n_head": {heads}, "n_positions": 8192,
                "vocab_size": 256, "attn_pdrop": 0.1}}"#,
            64 * heads
        );
        let model = catalog::hf::decode(&json, "test", "gpt2").expect("a model");
        let trace = layer(&model, &BlockLayout::alone(sequences, tokens, DType::F16));
        let lowered = lowered(&testing::runtime(runtime), &trace);
        let of = |kernel: &Kernel| match kernel.kind {
            KernelKind::Memory {
                kind: MemoryKind::Softmax,
                bytes,
                launches,
            } => Some((bytes.0, launches)),
            _ => None,
        };
        let all = lowered.forward.iter().chain(&lowered.backward);
        all.filter_map(of).collect()
    }

    #[test]
    fn megatron_fuses_what_its_kernel_takes() {
        // Sequences, tokens, heads, and whether one kernel computes the softmax.
        let cases = [
            (1, 1024, 16, true),
            (1, 4096, 4, true),
            (2, 1024, 2, true),
            (1, 1024, 2, false),
            (1, 1022, 16, false),
            (1, 16, 16, false),
            (1, 4100, 16, false),
        ];
        for (sequences, tokens, heads, fused) in cases {
            let scores = sequences * heads * tokens * tokens;
            // Half of what is read and all of what is written have 2 bytes; or five operators, mostly in 32 bits.
            let expected = match fused {
                true => vec![(3 * scores, 1), (4 * scores, 1)],
                false => vec![(36 * scores, 5), (40 * scores, 5)],
            };
            let found = softmaxes("megatron-2022", sequences, tokens, heads);
            assert_eq!(found, expected, "{sequences} × {tokens}, {heads} heads");
        }
    }
}
