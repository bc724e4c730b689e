//! Attention with a window, or over padded sequences, by PyTorch's `scaled_dot_product_attention`, whose caller has to pass either as a
//! mask.
//!
//! The function has no argument for a window or for padding. So Transformers makes a boolean mask of all queries and keys as soon as a
//! sequence is as long as the window or a sequence has padding (Transformers 5.24, `masking_utils.py`, `_ignore_causal_mask_sdpa`), and
//! `is_causal` is off. Then:
//! - The kernel computes all pairs, also those that the mask hides. It is cuDNN's or the memory-efficient one, as FlashAttention takes
//!   no mask (PyTorch 2.15, `sdp_utils.cpp`, `check_for_attn_mask`).
//! - Kernels that take a mask get no groups of query heads: keys and values are copied for every query head, and the copies are kept for
//!   backward (`integrations/sdpa_attention.py`, `use_gqa_in_sdpa` and `repeat_kv`).
//! - Every call makes numbers in the type of the queries from the mask and keeps them for backward (PyTorch 2.15,
//!   `transformers/attention.cpp`, `convert_boolean_attn_mask`; `tools/autograd/derivatives.yaml`, `attn_bias`).
//!
//! The boolean mask itself, which all layers share, is not counted. Without such a mask, Megatron-LM's own layers copy keys and values in
//! the same way (`Rewrite::RepeatKeys`), and so does Transformers where it computes attention by separate operators (`repeat_kv` in
//! `eager_attention_forward`).

use catalog::Bytes;
use dtensor::{AnyOp, AttentionPiece, AttentionShape, Factor, Op, Operator, Pass, Trace};

use super::kernel::{Chain, Kernel};
use super::lowering::Lowering;

/// The sizes of attention as its kernel computes it.
pub(super) fn computed(
    lowering: &Lowering<'_>,
    trace: &Trace,
    shape: AttentionShape,
) -> AttentionShape {
    let copied = AttentionShape {
        kv_heads: shape.heads,
        ..shape
    };
    match lowering.masks_keys(trace, shape) {
        true => AttentionShape {
            causal: false,
            window: None,
            ..copied
        },
        false if lowering.repeats_keys(trace, shape) => copied,
        false => shape,
    }
}

/// One memory-bound kernel that stands for the extra work around this attention kernel: making the
/// mask and the copies of keys and values before it, or adding up the gradients of the copies;
/// `None` if it takes neither mask nor copies. `op` is the attention's first operator.
pub(super) fn beside_attention(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    attention: &Kernel,
) -> Option<Kernel> {
    let Operator::Attention(of) = op.operator else {
        return None;
    };
    let shape = of.shape;
    let size = trace.tensor(op.inputs[0]).dtype.size();
    let copies = match lowering.repeats_keys(trace, shape) {
        // Both are read and written.
        true => Chain {
            bytes: Bytes(pairs(shape, shape.heads + shape.kv_heads) * size),
            launches: 2,
        },
        false => Chain::default(),
    };
    // One operator inverts the mask, a byte for each pair, and another makes numbers of it.
    let numbers = Chain {
        bytes: Bytes(entries(shape) * (3 + size)),
        launches: 2,
    };
    let chain = match attention.pass {
        Pass::Forward if lowering.masks_keys(trace, shape) => [copies, numbers].into_iter().sum(),
        _ => copies,
    };
    (chain.launches > 0).then(|| attention.beside(chain))
}

/// The same for attention by separate operators, of which `op` is one and `product` its kernel: beside the product of queries and keys,
/// and in backward beside the product that is the gradient of the keys.
pub(super) fn beside_scores(
    lowering: &Lowering<'_>,
    trace: &Trace,
    op: &AnyOp<'_>,
    product: &Kernel,
) -> Option<Kernel> {
    let of_scores =
        matches!(op.operator, Operator::Attention(of) if of.piece == AttentionPiece::Scores);
    let of_keys = of_scores && op.factor != Some(Factor::First);
    of_keys
        .then(|| beside_attention(lowering, trace, op, product))
        .flatten()
}

/// Bytes that attention keeps for backward in addition to its inputs: a mask as numbers, and copies of keys and values for the other query
/// heads. `None` for other operators and with neither.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let Operator::Attention(of) = op.operator else {
        return None;
    };
    let shape = of.shape;
    let size = trace.tensor(op.inputs[0]).dtype.size();
    let mask = match lowering.masks_keys(trace, shape) {
        true => entries(shape),
        false => 0,
    };
    let copies = match lowering.repeats_keys(trace, shape) {
        true => pairs(shape, shape.heads - shape.kv_heads),
        false => 0,
    };
    let numbers = mask + copies;
    (of.piece == AttentionPiece::Scores && numbers > 0).then_some(Bytes(numbers * size))
}

/// Entries of the mask, which all heads share.
fn entries(shape: AttentionShape) -> u64 {
    shape.batch * shape.q_len * shape.kv_len
}

/// Number of elements of the keys and values of `heads` heads.
fn pairs(shape: AttentionShape, heads: u64) -> u64 {
    shape.batch * shape.kv_len * heads * (shape.qk_dim + shape.v_dim)
}

#[cfg(test)]
mod tests {
    use catalog::runtime::Rewrite;
    use catalog::{DType, Runtime};
    use models::BlockLayout;
    use plans::Recompute;

    use super::*;
    use crate::lower::KernelKind;
    use crate::lower::testing::{self, KEYS, TOKENS, layer, layer_of, lowered, model};
    use crate::price::MemoryKind;

    /// Keys that a query's kernel computes on average, and the bytes kept for mask and copies, for a layer whose window is `window` and
    /// whose sequences have padding if `padded` says so.
    fn attended(runtime: &Runtime, window: &str, padded: bool) -> (u64, u64) {
        let model = model("mistral", &format!(r#", "sliding_window": {window}"#));
        let trace = layer(&model, &BlockLayout::alone(1, TOKENS, DType::Bf16));
        let lowering = Lowering::new(runtime, runtime.fp8_recipe).with_padding(padded);
        let kernels = lowering.lower(&trace).forward;
        let shape = kernels.iter().find_map(|kernel| match kernel.kind {
            KernelKind::Attention(of) => Some(of.shape),
            _ => None,
        });
        let shape = shape.expect("fused attention");
        let keys = match (shape.causal, shape.window) {
            (false, _) => TOKENS,
            (true, window) => window.map_or(TOKENS, |w| w.tokens().min(TOKENS)) / 2,
        };
        let saved = lowering.saved(&trace, Recompute::None);
        let mask = saved.iter().filter(|(name, _)| name.contains(".mask"));
        (keys, mask.map(|(_, bytes)| bytes.0).sum())
    }

    #[test]
    fn pytorch_computes_all_pairs_where_it_gets_a_mask() {
        // The mask has 2 bytes for each pair. Keys and values of the other two of four heads are copied.
        let mask = 2 * TOKENS * TOKENS + 2 * TOKENS * 2 * KEYS;
        for (runtime, window, padded, expected) in [
            ("hf-trainer", "16", false, (TOKENS, mask)),
            ("hf-deepspeed", "32", false, (TOKENS, mask)),
            ("generic-eager", "16", false, (TOKENS, mask)),
            ("hf-trainer", "33", false, (TOKENS / 2, 0)),
            ("hf-trainer", "null", false, (TOKENS / 2, 0)),
            ("hf-trainer", "null", true, (TOKENS, mask)),
            ("hf-deepspeed", "16", true, (TOKENS, mask)),
            ("megatron-core", "16", false, (TOKENS / 4, 0)),
            ("megatron-core", "null", true, (TOKENS / 2, 0)),
            ("torchtitan-2026", "16", false, (TOKENS / 4, 0)),
            ("generic-fused", "16", true, (TOKENS / 4, 0)),
        ] {
            let found = attended(&testing::runtime(runtime), window, padded);
            let what = format!("a window of {window} under {runtime}, padded: {padded}");
            assert_eq!(found, expected, "{what}");
        }
    }

    #[test]
    fn repeated_keys_are_kept_without_a_mask() {
        let mut runtime = testing::runtime("megatron-core");
        runtime.rewrites.insert(Rewrite::RepeatKeys);
        let copies = 2 * TOKENS * 2 * KEYS;
        assert_eq!(attended(&runtime, "null", false), (TOKENS / 2, copies));
    }

    /// Gemma 2 has 16 query heads and 8 key heads of 256 numbers. Copies of keys and values are made in forward and their gradients added up
    /// in backward, by two kernels each, that read or write 16 heads and write or read 8.
    #[test]
    fn attention_by_separate_operators_copies_keys() {
        let trace = layer_of("gemma2-9b");
        let numbers = TOKENS * 2 * 256;
        for (runtime, copies) in [("hf-deepspeed", true), ("vescale", false)] {
            let runtime = testing::runtime(runtime);
            let lowered = lowered(&runtime, &trace);
            let of = |kernel: &&Kernel| {
                let operator = trace.op(kernel.pass, kernel.op).operator;
                matches!(operator, Operator::Attention(_)) && kernel.reads.is_empty()
            };
            let all = lowered.forward.iter().chain(&lowered.backward);
            let found: Vec<_> = all.filter(of).map(|kernel| kernel.kind).collect();
            let one = KernelKind::Memory {
                kind: MemoryKind::Pointwise,
                bytes: Bytes(2 * numbers * (16 + 8)),
                launches: 2,
            };
            let expected = if copies { vec![one; 2] } else { vec![] };
            assert_eq!(found, expected, "{}", runtime.name);
            let saved = Lowering::new(&runtime, runtime.fp8_recipe).saved(&trace, Recompute::None);
            let kept = saved
                .iter()
                .filter(|(name, _)| name.contains("copied keys"));
            let kept: u64 = kept.map(|(_, bytes)| bytes.0).sum();
            assert_eq!(kept, u64::from(copies) * 2 * numbers * (16 - 8));
        }
    }
}
