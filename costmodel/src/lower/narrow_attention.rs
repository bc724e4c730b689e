//! Fused attention that multiplies in 8 bits (Transformer Engine's `fp8_dpa` with MXFP8).
//!
//! - Queries, keys and values are cast before each pass, and the gradient of the output before backward: along the sequence, the head or
//!   both, as the pass multiplies them (NVIDIA/TransformerEngine@4220403, `dot_product_attention/utils.py`, `combine_and_quantize`, and
//!   `backends.py`, `FusedAttnFunc`). For backward the 16-bit tensors are kept, so memory is that of attention in 16 bits.
//! - A window saves the backward pass nothing. With a window of 128 tokens it takes 2.08 ms for a sequence of 4,096 tokens and 27.9 ms for
//!   16,384: the square of the length, as without a window. In 16 bits it takes 0.465 and 1.82 ms (NVIDIA/cudnn-frontend@3929da2,
//!   `benchmark/sdpa_benchmark_training/results/gpt_oss/gb200`).

use catalog::Bytes;
use catalog::runtime::AttentionKernel;
use dtensor::AttentionShape;

use super::kernel::{Chain, FusedAttention, Kernel, KernelKind};

/// Bytes moved per element by a cast from 16 bits to 8 along one dimension.
const ALONG_ONE: u64 = 2 + 1;
/// Bytes moved per element by a cast along two dimensions.
const ALONG_BOTH: u64 = ALONG_ONE + 1;

/// The attention that a kernel computes: backward in 8 bits ignores a window, and computes all keys.
pub(super) fn computed(attention: FusedAttention) -> FusedAttention {
    let all_keys = attention.kernel == AttentionKernel::CudnnFp8 && attention.backward;
    let window = attention.shape.window.filter(|_| !all_keys);
    let shape = AttentionShape {
        window,
        ..attention.shape
    };
    FusedAttention { shape, ..attention }
}

/// The casts that an attention kernel of 8 bits needs before it; `None` for other kernels.
pub(super) fn casts(kernel: &Kernel) -> Option<Kernel> {
    let KernelKind::Attention(of) = kernel.kind else {
        return None;
    };
    let s = of.shape;
    let queries = s.batch * s.q_len * s.heads;
    let keys = s.batch * s.kv_len * s.kv_heads;
    let queries_and_keys = (queries + keys) * s.qk_dim;
    let values = keys * s.v_dim;
    let chain = match of.backward {
        false => Chain {
            bytes: Bytes((queries_and_keys + values) * ALONG_ONE),
            launches: 3,
        },
        true => Chain {
            bytes: Bytes((queries_and_keys + queries * s.v_dim) * ALONG_BOTH + values * ALONG_ONE),
            launches: 4,
        },
    };
    (of.kernel == AttentionKernel::CudnnFp8).then(|| kernel.beside(chain))
}

#[cfg(test)]
mod tests {
    use models::BlockLayout;

    use super::*;
    use crate::lower::testing::{HIDDEN, KEYS, TOKENS, layer, lowered, model, runtime};

    /// Whether attention of a pass has a window, with the bytes that casts before it move.
    fn passes(kernel: AttentionKernel, eight_bits: bool) -> [(bool, u64); 2] {
        let model = model("mistral", r#", "sliding_window": 16"#);
        let layout = BlockLayout {
            eight_bits,
            ..BlockLayout::alone(1, TOKENS, catalog::DType::Bf16)
        };
        let mut runtime = runtime("megatron-core");
        runtime.attention = kernel;
        let lowered = lowered(&runtime, &layer(&model, &layout));
        [lowered.forward, lowered.backward].map(|pass| {
            let at = pass
                .iter()
                .position(|kernel| matches!(kernel.kind, KernelKind::Attention(_)));
            let at = at.expect("fused attention");
            let KernelKind::Attention(of) = pass[at].kind else {
                unreachable!("just found")
            };
            let before = match pass[at - 1].kind {
                KernelKind::Memory { bytes, .. } if pass[at - 1].op == pass[at].op => bytes.0,
                _ => 0,
            };
            (of.shape.window.is_some(), before)
        })
    }

    #[test]
    fn attention_of_8_bits_casts_its_inputs_and_its_backward_sees_all_keys() {
        use AttentionKernel::{CudnnFp8, CudnnOrFlash3};
        let plain = [(true, 0); 2];
        for (kernel, eight_bits) in [(CudnnOrFlash3, true), (CudnnFp8, false)] {
            assert_eq!(passes(kernel, eight_bits), plain, "{kernel:?} {eight_bits}");
        }
        let [forward, backward] = passes(CudnnFp8, true);
        let (queries, keys) = (TOKENS * HIDDEN, TOKENS * KEYS);
        assert_eq!(forward, (true, 3 * (queries + 2 * keys)));
        assert_eq!(backward, (false, 4 * (2 * queries + keys) + 3 * keys));
    }
}
