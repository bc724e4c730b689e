//! Core attention of a trace as one operator, and when a library may run it.

use std::collections::BTreeMap;

use catalog::DType;

use crate::trace::{Detail, Op, OpKind, SoftmaxRule, Trace};

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

/// The pieces that a fused attention stands for, as indices in the forward trace.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPieces {
    /// Place of the products of queries and keys in the forward list.
    pub scores: usize,
    /// Place of the products of weights and values.
    pub context: usize,
    /// Place of the dropout of weights, if there is one.
    pub dropout: Option<usize>,
}

impl Trace {
    /// The pieces of core attention in a scope, in order.
    pub(crate) fn pieces<'t>(&'t self, scope: &'t str) -> impl Iterator<Item = usize> + 't {
        let pieces = self.forward.iter().enumerate();
        let here = move |op: &Op| op.scope == scope && op.is_core_attention();
        pieces
            .filter(move |(_, op)| here(op))
            .map(|(index, _)| index)
    }

    /// The pieces of the attention in a scope.
    #[must_use]
    pub fn attention_pieces(&self, scope: &str) -> Option<AttentionPieces> {
        let find = |wanted: fn(&OpKind) -> bool| {
            let mut pieces = self.pieces(scope);
            pieces.find(|&i| wanted(&self.forward[i].kind))
        };
        Some(AttentionPieces {
            scores: find(|kind| matches!(kind, OpKind::AttentionScores(_)))?,
            context: find(|kind| matches!(kind, OpKind::AttentionContext(_)))?,
            dropout: find(|kind| matches!(kind, OpKind::Dropout)),
        })
    }

    /// How these scores become weights.
    #[must_use]
    pub fn softmax_rule(&self, scores: usize) -> Option<SoftmaxRule> {
        let scores = self.forward[scores].outputs[0];
        let mut ops = self.forward.iter();
        let softmax = ops.find(|op| op.inputs.first() == Some(&scores))?;
        match softmax.detail {
            Detail::Softmax(rule) => Some(rule),
            _ => None,
        }
    }

    /// The core attentions that a library may have, by the place of their scores in forward.
    pub(crate) fn causal_attentions(&self) -> BTreeMap<usize, CausalAttention> {
        let ops = self.forward.iter().enumerate();
        let scores = ops.filter(|(_, op)| matches!(op.kind, OpKind::AttentionScores(_)));
        scores
            .filter_map(|(index, op)| Some((index, self.causal_attention(&op.scope)?)))
            .collect()
    }

    /// The core attention in a scope, if a library may have it.
    #[must_use]
    pub fn causal_attention(&self, scope: &str) -> Option<CausalAttention> {
        let pieces = self.attention_pieces(scope)?;
        let scores = &self.forward[pieces.scores];
        let OpKind::AttentionScores(shape) = scores.kind else {
            return None;
        };
        let rule = self.softmax_rule(pieces.scores)?;
        let plain = rule.cap.is_none() && rule.sinks.is_none() && rule.alibi.is_none();
        let drops = |op: usize| match self.forward[op].detail {
            Detail::Dropout { probability } => probability > 0.0,
            _ => true,
        };
        let q = self.tensor(scores.inputs[0]);
        let whole = shape.causal && shape.q_len == shape.kv_len && q.shape[1] == q.global[1];
        let (multiple, most) = HEAD;
        let fits = |dim: u64| dim.is_multiple_of(multiple) && dim <= most;
        let takes = plain
            && whole
            && q.dtype == DType::Bf16
            && fits(shape.qk_dim)
            && fits(shape.v_dim)
            && !pieces.dropout.is_some_and(drops);
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

impl Op {
    /// Whether it is one of the unfused pieces of core attention.
    #[must_use]
    pub fn is_core_attention(&self) -> bool {
        self.scope.ends_with("core_attention") && !matches!(self.kind, OpKind::Collective(_))
    }
}
