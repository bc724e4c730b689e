//! Core attention as separate operators: scores, softmax, dropout, context.

use catalog::{Axis, elementary};

use crate::gradients::{Backward, Of};
use crate::operator::{
    Attention, AttentionPiece, AttentionShape, Class, CostClass, Factor, Gradient, Name, Operator,
    SoftmaxRule,
};
use crate::placement::{BLOCK_AXES, Placement, Placements};
use crate::tape::{DTensor, Tape};
use crate::trace::{AttentionPieces, Pass};

impl Tape<'_> {
    /// Core attention of `q: [b, s, heads·d]`, `k` and `v` likewise, sharded by heads; returns `[b, s, heads·d_v]`.
    pub fn attention(
        &mut self,
        scope: &str,
        [q, k, v]: [&DTensor; 3],
        shape: AttentionShape,
        (rule, probability): (SoftmaxRule, f64),
    ) -> DTensor {
        let of = self.trace.attentions.len();
        let operator = |piece| Operator::Attention(Attention { of, shape, piece });
        let scores = self.scores(&format!("{scope}.scores"), q, shape);
        let probabilities = self.scores(&format!("{scope}.probabilities"), q, shape);
        let first = self.trace.forward.len();
        let product = operator(AttentionPiece::Scores);
        self.record(scope, product, &[q, k], &scores, &[q.id, k.id]);
        // The derivative of the soft cap also needs the scores.
        let saved: &[_] = match rule.cap {
            Some(_) => &[probabilities.id, scores.id],
            None => &[probabilities.id],
        };
        let softmax = operator(AttentionPiece::Softmax(rule));
        self.record(scope, softmax, &[&scores], &probabilities, saved);
        let drops = probability > 0.0;
        let weights = if drops {
            let dropout = operator(AttentionPiece::Dropout(probability));
            self.masked(scope, dropout, &probabilities)
        } else {
            probabilities
        };
        let mut out_shape = q.shape.clone();
        let last = out_shape.len() - 1;
        out_shape[last] = q.shape[last] / shape.qk_dim * shape.v_dim;
        let out = self.output(scope, &out_shape, q.placements, q.dtype);
        let (product, saved) = (operator(AttentionPiece::Context), [weights.id, v.id]);
        self.record(scope, product, &[&weights, v], &out, &saved);
        self.trace.attentions.push(AttentionPieces {
            scores: first,
            dropout: drops.then_some(first + 2),
            context: self.trace.forward.len() - 1,
            rule,
            probability,
        });
        out
    }

    /// A new tensor `[batch, heads, q_len, kv_len]`, such as the scores.
    fn scores(&mut self, name: &str, q: &DTensor, shape: AttentionShape) -> DTensor {
        let dims = vec![shape.batch, shape.heads, shape.q_len, shape.kv_len];
        let scores = self.rows(name, dims, q.dtype);
        let heads = q.shape[2] / shape.qk_dim;
        let global = [shape.batch, heads, q.shape[1], shape.kv_len];
        self.place(scores.id, &global, scores_placements(q.placements));
        scores
    }
}

/// Placements of attention's scores `[b, heads, q, kv]`, given those of the queries `[b, s, heads·d]`.
fn scores_placements(queries: Placements) -> Placements {
    let mut placements = Placements::REPLICATE;
    for axis in BLOCK_AXES {
        let on = match queries.on(axis) {
            Placement::Shard(1) => Placement::Shard(2),
            Placement::Shard(2) => Placement::Shard(1),
            other => other,
        };
        placements = placements.with(axis, on);
    }
    placements
}

impl Attention {
    /// Softmax and dropout have one backward kernel; a product has one per factor, which reads the other factor.
    pub(super) fn backward(self, to: &mut Backward<'_, '_>, of: Of<'_>, gradient: &DTensor) {
        let (index, record) = (of.index, of.record);
        let operator = |factor| Gradient::Attention(index, self, factor);
        let scores = match self.piece {
            AttentionPiece::Scores => record.output.as_ref(),
            AttentionPiece::Context => record.inputs.first(),
            AttentionPiece::Softmax(_) | AttentionPiece::Dropout(_) => {
                let one = operator(Factor::First);
                return to.push_one(of, gradient, one, |_, placed| placed);
            }
        };
        let factors = [Factor::First, Factor::Second].into_iter().enumerate();
        for ((at, factor), input) in factors.zip(&record.inputs) {
            let other = record.inputs[1 - at].id;
            let mut out = to.of_input(index, at, input);
            let split = scores.is_some_and(|scores| splits_queries(to.tape, scores, input));
            if factor == Factor::Second && split {
                out.placements = out.placements.with(Axis::Cp, Placement::Partial);
            }
            let tensors = [vec![gradient.id, other], vec![out.id]];
            to.push(index, Pass::BackwardInput, operator(factor), tensors);
            to.accumulate(input, out);
        }
    }

    /// Name in profiles and cost class. Gradients of queries and of keys are different products.
    pub(super) fn class(self, factor: Option<Factor>) -> Class {
        let product = |name| Name::Attention(name, factor);
        match self.piece {
            AttentionPiece::Scores => (product("scores"), CostClass::AttentionScores(self.shape)),
            AttentionPiece::Softmax(_) => ("softmax".into(), CostClass::Softmax(self.shape)),
            AttentionPiece::Dropout(_) => ("dropout".into(), CostClass::Dropout),
            AttentionPiece::Context => {
                (product("context"), CostClass::AttentionContext(self.shape))
            }
        }
    }
}

/// Whether keys or values are replicated over context parallelism while queries are sharded, so that each rank has
/// only a partial sum of their gradient.
fn splits_queries(tape: &Tape<'_>, scores: &DTensor, keys: &DTensor) -> bool {
    tape.mesh().cp > 1
        && tape.trace.tensor(scores.id).placements.on(Axis::Cp) == Placement::Shard(2)
        && keys.placements.on(Axis::Cp) == Placement::Replicate
}

impl SoftmaxRule {
    /// Whether it does no more than scale the scores, so that fused kernels of all libraries compute it.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.cap.is_none() && self.sinks.is_none() && self.alibi.is_none()
    }

    /// The ALiBi slope of a head, by which its scores fall per token of distance (Press et al. 2022, §3): powers of
    /// `2^(−8/n)` for `n` heads, a power of two; any further heads take every other power for `2n` heads.
    #[must_use]
    pub fn slope(&self, head: u64) -> Option<f32> {
        let n = 1u64 << self.alibi?.ilog2();
        let power = if head < n {
            8.0 * (head + 1) as f64 / n as f64
        } else {
            4.0 * (2 * (head - n) + 1) as f64 / n as f64
        };
        Some(elementary::exp2(-power) as f32)
    }
}
