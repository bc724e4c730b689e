//! Kernels for the softmax of attention scores, in runtimes whose attention is not a single kernel.

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{AnyOp, Attention, AttentionPiece, AttentionShape, Op, Operator, Pass, Trace};

use super::kernel::{Chain, Kernel, WIDE, traffic};
use super::lowering::Lowering;
use crate::price::MemoryKind;

/// Largest number of keys that Megatron's fused softmax kernel supports (Megatron-LM@9200e43, `fused_softmax.py`, `is_kernel_available`).
const MOST_KEYS: u64 = 4096;

/// How a runtime scales, caps, masks and normalises attention scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By one kernel that a compiler makes.
    Compiled,
    /// By Megatron's fused kernel.
    Fused,
    /// By a kernel for each step, all in the type of the scores.
    InTheirType,
    /// By a kernel for each step, of which the softmax itself runs in 32 bits although scores and probabilities have fewer. The steps
    /// before it have the type `before`.
    In32Bits { before: DType },
}

impl Way {
    /// The way for attention whose scores have the type `scores`.
    fn of(lowering: &Lowering<'_>, trace: &Trace, attention: Attention, scores: DType) -> Self {
        let narrow = scores.size() < DType::F32.size();
        if lowering.has(Rewrite::FusePointwise) {
            Self::Compiled
        } else if narrow && lowering.has(Rewrite::FuseScaledMaskedSoftmax) {
            match takes(attention.shape) {
                true => Self::Fused,
                false => Self::In32Bits { before: DType::F32 },
            }
        } else if narrow && casts_for_softmax(lowering, trace, attention, scores) {
            Self::In32Bits { before: scores }
        } else {
            Self::InTheirType
        }
    }
}

/// Whether PyTorch's operators compute the softmax of these narrow scores in 32 bits:
/// - Transformers asks for it in models with a soft cap or ALiBi, under whatever engine (Transformers 5.24, `modeling_gemma2.py`,
///   `modeling_bloom.py`, `modeling_mpt.py`).
/// - With sinks its softmax has the type of scores and sinks joined (`modeling_gpt_oss.py`), so 32 bits where autocast leaves sinks so.
/// - Elsewhere `torch.autocast` casts (the fp32 list in PyTorch's `autocast_mode.h`; Transformers 4.12, `GPT2Attention._attn`).
fn casts_for_softmax(
    lowering: &Lowering<'_>,
    trace: &Trace,
    attention: Attention,
    scores: DType,
) -> bool {
    let sinks = trace.attentions[attention.of].rule.sinks;
    match (lowering.attends_by_operators(trace), sinks) {
        (true, Some(_)) => lowering.widens_stream(scores),
        (true, None) => true,
        (false, _) => lowering.autocasts(scores),
    }
}

/// The kernels that scale, cap, mask and normalise attention scores, or those that compute the gradient of this. A fused softmax is one
/// kernel; otherwise each of the steps is one. `None` for other operators.
pub(super) fn kernels(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Kernel> {
    let Operator::Attention(attention) = op.operator else {
        return None;
    };
    let scores = trace.tensor(op.inputs[0]);
    let (elements, own) = (scores.elements(), scores.dtype);
    let one = |bytes| Chain { bytes, launches: 1 };
    let cap = |before| match trace.attentions[attention.of].rule.cap {
        Some(_) => of_cap(elements, before, op.pass),
        None => Chain::default(),
    };
    let chain = match Way::of(lowering, trace, attention, own) {
        Way::Compiled => one(traffic(trace, op.inputs, op.outputs)),
        Way::Fused => one(moved_by_fused(trace, op, attention.shape)),
        Way::InTheirType => [in_their_type(elements, own, op.pass), cap(own)]
            .into_iter()
            .sum(),
        Way::In32Bits { before } => [in_32_bits(elements, own, before, op.pass), cap(before)]
            .into_iter()
            .sum(),
    };
    Some(Kernel::of(op, chain.bound_by_memory(MemoryKind::Softmax)))
}

/// Bytes of the softmax's result in 32 bits, which its backward reads. They are held in addition to the probabilities that the trace
/// keeps. The product of probabilities and values keeps a cast of that result, unless dropout comes between and nothing keeps the cast.
/// `None` for other operators and for a softmax that does not run in 32 bits by a kernel of its own.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let attention = op.attention()?;
    let result = trace.tensor(op.outputs[0]);
    let wide = || {
        let way = Way::of(lowering, trace, attention, result.dtype);
        matches!(way, Way::In32Bits { .. })
    };
    let of_softmax = matches!(attention.piece, AttentionPiece::Softmax(_));
    if !of_softmax || lowering.fuses_attention(trace) || !wide() {
        return None;
    }
    let counted = match trace.attentions[attention.of].dropout {
        Some(_) => result.dtype.size(),
        None => 0,
    };
    Some(Bytes(result.elements() * (WIDE - counted)))
}

/// The soft cap of scores, `c·tanh(x/c)`: three kernels. Those of a factor, forward and backward, and tanh in forward read and write one
/// number for each score; tanh in backward reads its result too (Transformers 5.24, `modeling_gemma2.py`, `eager_attention_forward`).
fn of_cap(elements: u64, scores: DType, pass: Pass) -> Chain {
    let tensors = if pass == Pass::Forward { 6 } else { 7 };
    Chain {
        bytes: Bytes(elements * tensors * scores.size()),
        launches: 3,
    }
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

/// The kernels of a softmax of scores in their own type: scale, mask, and the softmax itself, whose gradient reads a tensor more. The
/// others' gradients are counted as such too.
fn in_their_type(elements: u64, scores: DType, pass: Pass) -> Chain {
    let tensors = if pass == Pass::Forward { 2 } else { 3 };
    Chain {
        bytes: Bytes(elements * 3 * tensors * scores.size()),
        launches: 3,
    }
}

/// The kernels of a softmax in 32 bits whose scores and probabilities have the type `narrow`. There are five in forward: scale, mask,
/// a cast to 32 bits, the softmax, and a cast back. Backward has five too, one for the gradient of each. `before` is the type in
/// which scale and mask are computed: `narrow` in Transformers; 32 bits in Megatron-LM where the fused kernel does not support the shape,
/// as by default (`apply_query_key_layer_scaling`) it casts first.
fn in_32_bits(elements: u64, narrow: DType, before: DType, pass: Pass) -> Chain {
    let (narrow, before, wide) = (narrow.size(), before.size(), WIDE);
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
    use plans::Recompute;

    use super::*;
    use crate::lower::KernelKind;
    use crate::lower::testing::{self, layer, layer_of, lowered};

    /// Bytes and launches of the softmaxes of forward and backward of a layer whose heads have 64 dimensions.
    fn softmaxes(runtime: &str, sequences: u64, tokens: u64, heads: u64) -> Vec<(u64, u32)> {
        let json = format!(
            r#"{{"model_type": "gpt2", "n_embd": {}, "n_layer": 1, "n_head": {heads}, "n_positions": 8192,
                "vocab_size": 256, "attn_pdrop": 0.1}}"#,
            64 * heads
        );
        let model = catalog::hf::decode(&json, "test", "gpt2").expect("a model");
        let layout = BlockLayout::alone(sequences, tokens, DType::F16);
        of_layer(runtime, &layer(&model, &layout))
    }

    /// Bytes and launches of the softmaxes of forward and backward of a layer.
    fn of_layer(runtime: &str, trace: &Trace) -> Vec<(u64, u32)> {
        let lowered = lowered(&testing::runtime(runtime), trace);
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

    /// For each score, bytes and launches of forward and of backward, and the bytes of the softmax's result that is kept beside the
    /// probabilities.
    #[test]
    fn softmaxes_run_in_32_bits_where_transformers_or_autocast_say_so() {
        // Scale and mask in 2 bytes, cast, softmax and cast back, and the same backward.
        let in_32_bits = [(8 + 12 + 8, 5), (8 + 12 + 12, 5)];
        let in_16_bits = [(12, 3), (18, 3)];
        // The soft cap's factor, tanh and factor.
        let capped = [(28 + 12, 8), (32 + 14, 8)];
        for (model, runtime, expected, kept) in [
            ("gemma2-9b", "hf-deepspeed", capped, 4),
            ("gemma2-9b", "hf-trainer", capped, 4),
            ("bloom-7b1", "hf-deepspeed", in_32_bits, 4),
            // Sinks are parameters, in 16 bits under DeepSpeed.
            ("gpt-oss-20b", "hf-deepspeed", in_16_bits, 0),
            ("gpt-oss-20b", "hf-trainer", in_32_bits, 4),
            // Dropout keeps neither what it reads nor the softmax's result.
            ("gpt2", "hf-trainer-2021", in_32_bits, 2),
            ("gpt2", "hf-deepspeed-2021", in_16_bits, 0),
        ] {
            let trace = layer_of(model);
            let scores = trace.forward[trace.attentions[0].scores].outputs[0];
            let scores = trace.tensor(scores).elements();
            let found = of_layer(runtime, &trace);
            let expected = expected.map(|(bytes, launches)| (bytes * scores, launches));
            assert_eq!(found, expected, "{model} {runtime}");
            let runtime = testing::runtime(runtime);
            let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
            let saved = lowering.saved(&trace, Recompute::None).into_iter();
            let of_softmax = saved.filter(|(name, _)| name.contains("softmax in 32 bits"));
            let found: u64 = of_softmax.map(|(_, bytes)| bytes.0).sum();
            assert_eq!(found, kept * scores, "{model} {}", runtime.name);
        }
    }
}
