//! Core attention of a trace as one operator, and when a library may run it.

use catalog::DType;

use crate::trace::Trace;

/// Head dimensions that cuDNN's attention takes: multiples of the first number, up to the second.
const HEAD: (u64, u64) = (8, 256);

/// Core attention as a library may have it: bf16, whole sequences from their first token on, queries that see
/// the keys up to their own place, no dropout. Tensors lie `[batch, length, heads · dims]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CausalAttention {
    /// Sequences.
    pub batch: i64,
    /// Tokens of each.
    pub length: i64,
    /// Heads of queries and of keys.
    pub heads: [i64; 2],
    /// Dimensions of a head of queries and keys, and of values.
    pub dims: [i64; 2],
    /// Keys seen at most.
    pub window: Option<i64>,
}

impl CausalAttention {
    /// Bytes of sums in 32 bits that backward has beside a library's own workspace: gradients of queries, and
    /// one number per query.
    #[must_use]
    pub fn sums(&self) -> [u64; 2] {
        let rows = (self.batch * self.heads[0] * self.length) as u64;
        [rows * self.dims[0] as u64 * 4, rows * 4]
    }

    /// Bytes of workspace of backward as cuDNN 9 asks for on Hopper, sums included: where several heads share a
    /// key, gradients of keys and values of each of them in bf16.
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
    /// The core attention at this place in [`Trace::attentions`], if a library may have it.
    #[must_use]
    pub fn causal_attention(&self, of: usize) -> Option<CausalAttention> {
        let pieces = self.attentions[of];
        let scores = &self.forward[pieces.scores];
        let shape = scores.attention()?.shape;
        let rule = pieces.rule;
        let plain = rule.cap.is_none() && rule.sinks.is_none() && rule.alibi.is_none();
        let q = self.tensor(scores.inputs[0]);
        let whole = shape.causal && shape.q_len == shape.kv_len && q.shape[1] == q.global[1];
        let (multiple, most) = HEAD;
        let fits = |dim: u64| dim.is_multiple_of(multiple) && dim <= most;
        let takes = plain
            && whole
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
            window: shape.window.filter(|&w| w < shape.kv_len).map(|w| w as i64),
        })
    }
}
