//! Recognises core attention in a trace that a fused library kernel (cuDNN) may run as one operator.

use catalog::{DType, Window};

use crate::trace::Trace;

/// cuDNN's limits on head dimensions: they must be multiples of the first number and at most the second.
const HEAD: (u64, u64) = (8, 256);

/// A core attention in the form that a fused library kernel accepts: bf16, causal, no dropout, whole sequences that
/// start at their first token. Tensors have the shape `[batch, length, heads · dims]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CausalAttention {
    /// Number of sequences.
    pub batch: i64,
    /// Tokens per sequence.
    pub length: i64,
    /// Number of query heads, and of key/value heads.
    pub heads: [i64; 2],
    /// Head dimension of queries and keys, and of values.
    pub dims: [i64; 2],
    /// Sliding window: the most keys that a query attends to; `None` for no limit.
    pub window: Option<i64>,
}

impl CausalAttention {
    /// Bytes of the fp32 buffers that backward allocates in addition to the library's own
    /// workspace: gradients of queries, and one number per query and head.
    #[must_use]
    pub fn sums(&self) -> [u64; 2] {
        let rows = (self.batch * self.heads[0] * self.length) as u64;
        [rows * self.dims[0] as u64 * 4, rows * 4]
    }

    /// Bytes of workspace that cuDNN 9 asks for in backward on Hopper, [`CausalAttention::sums`] included. With
    /// grouped queries it also holds bf16 gradients of keys and values per query head.
    #[must_use]
    pub fn backward_workspace(&self) -> u64 {
        let [queries, keys] = self.heads;
        let rows = (self.batch * queries * self.length) as u64;
        let each = rows * (self.dims[0] + self.dims[1]) as u64 * DType::Bf16.size();
        let apart = if queries == keys { 0 } else { each };
        self.sums().iter().sum::<u64>() + apart
    }
}

impl Trace {
    /// The core attention at index `of` of [`Trace::attentions`], or `None` if the fused kernel does not support it.
    #[must_use]
    pub fn causal_attention(&self, of: usize) -> Option<CausalAttention> {
        let pieces = self.attentions[of];
        let scores = &self.forward[pieces.scores];
        let shape = scores.attention()?.shape;
        let q = self.tensor(scores.inputs[0]);
        let whole = shape.causal && shape.q_len == shape.kv_len && q.shape[1] == q.global[1];
        let (multiple, most) = HEAD;
        let fits = |dim: u64| dim.is_multiple_of(multiple) && dim <= most;
        let window = shape.window.filter(|w| w.tokens() < shape.kv_len);
        let takes = pieces.rule.is_plain()
            && whole
            && !matches!(window, Some(Window::Chunk(_)))
            && q.dtype == DType::Bf16
            && fits(shape.qk_dim)
            && fits(shape.v_dim)
            && pieces.dropout.is_none();
        let heads = q.shape.last()? / shape.qk_dim;
        takes.then_some(CausalAttention {
            batch: q.shape[0] as i64,
            length: shape.q_len as i64,
            heads: [heads, heads * shape.kv_heads / shape.heads].map(|n| n as i64),
            dims: [shape.qk_dim, shape.v_dim].map(|n| n as i64),
            window: window.map(|w| w.tokens() as i64),
        })
    }
}
