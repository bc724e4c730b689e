//! Core attention of a pass: scores, softmax, context, and the context-parallel ring.

use super::state::Run;
use crate::attention::{Heads, Weighting};
use crate::block::GradientSink;
use crate::machine::Result;
use crate::math::add;
use crate::tensor::Tensor;
use crate::tokens;
use crate::tree::TreeSum;
use crate::value::Value;
use catalog::Axis;
use dtensor::placement::Placement;
use dtensor::{AttentionPiece, AttentionShape, Factor, Gradient, Op, SoftmaxRule, TensorId};
use std::ops::Range;
use std::sync::Arc;

impl Run<'_> {
    pub(super) fn attention_scores(&mut self, op: &Op, shape: &AttentionShape) -> Result<()> {
        let [q, k] = [op.inputs[0], op.inputs[1]];
        let (positions, dim) = (self.positions_of(q), shape.qk_dim as usize);
        let x = self.tensor(q)?;
        let heads = self.heads(shape, &positions, [x.shape[0], x.columns() / dim]);
        self.rows_by_keys(&heads, [q, k], dim, op.outputs[0])
    }

    /// Scores of queries and keys, or the gradient of weights from that of the context and values.
    fn rows_by_keys(
        &mut self,
        heads: &Heads<'_>,
        [x, keys]: [TensorId; 2],
        dim: usize,
        out: TensorId,
    ) -> Result<()> {
        let data = heads.rows_by_keys(&self.tensor(x)?.f32(), &self.keys(keys)?.f32(), dim);
        let queries = heads.positions.len();
        let dims = vec![heads.batch, heads.heads, queries, heads.kv_len];
        self.put_tensor(out, dims, data);
        Ok(())
    }

    /// The context of weights and values, or the gradient of queries from that of the scores and keys.
    fn weighted_keys(
        &mut self,
        heads: &Heads<'_>,
        [w, keys]: [TensorId; 2],
        dim: usize,
        out: TensorId,
    ) -> Result<()> {
        let data = heads.weighted_keys(&self.tensor(w)?.f32(), &self.keys(keys)?.f32(), dim);
        let dims = vec![heads.batch, heads.positions.len(), heads.heads * dim];
        self.put_tensor(out, dims, data);
        Ok(())
    }

    pub(super) fn softmax(
        &mut self,
        op: &Op,
        shape: &AttentionShape,
        rule: SoftmaxRule,
    ) -> Result<()> {
        let x = self.tensor(op.inputs[0])?;
        let positions = self.scores_positions(op.inputs[0]);
        let heads = self.heads_of_scores(shape, &positions, x);
        let out = heads.softmax(&x.f32(), &self.weighting(rule, op.inputs[0])?);
        let dims = x.shape.clone();
        self.put_tensor(op.outputs[0], dims, out);
        Ok(())
    }

    pub(super) fn softmax_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        (shape, rule): (&AttentionShape, SoftmaxRule),
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let p = self.tensor(forward.outputs[0])?;
        let positions = self.scores_positions(forward.outputs[0]);
        let heads = self.heads_of_scores(shape, &positions, p);
        let dp = self.tensor(op.inputs[0])?.f32();
        let weighting = self.weighting(rule, forward.inputs[0])?;
        let mut out = heads.softmax_backward(&p.f32(), &dp, weighting.scale);
        if let Some(cap) = weighting.cap {
            let scores = self.tensor(forward.inputs[0])?.f32();
            heads.uncap(&mut out, &scores, (weighting.scale, cap));
        }
        if let Some(sinks) = rule.sinks {
            let each = heads.sinks_backward(&p.f32(), &dp);
            let columns = heads.heads;
            let value = |row: usize, head: usize| each[row * columns + head];
            let scores = self.info(forward.inputs[0]);
            let held = self
                .machine
                .position
                .numbers_of_heads(self.info(sinks), scores);
            self.query_sum(sink, (sinks, held), (p.shape[0], &positions), value)?;
        }
        let dims = p.shape.clone();
        self.put_tensor(op.outputs[0], dims, out);
        Ok(())
    }

    /// Adds a sum over this rank's queries to the gradient of a parameter with one number per head, in the range of
    /// local heads.
    fn query_sum(
        &self,
        sink: &mut dyn GradientSink,
        (parameter, part): (TensorId, Range<usize>),
        (sequences, positions): (usize, &[u64]),
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<()> {
        let rows = 0..sequences * positions.len();
        let leaves = || {
            self.machine
                .leaves_at(positions, sequences as u64, self.batch)
        };
        self.accumulate(sink, (parameter, part), (rows, leaves), |rows, out| {
            tokens::column_sum(rows, out, &value);
        })
    }

    /// How the scores of this rank's heads become attention weights.
    fn weighting(&self, rule: SoftmaxRule, scores: TensorId) -> Result<Weighting> {
        let info = self.info(scores);
        let position = &self.machine.position;
        let here = position.indices(&info.global, &info.placements, 1);
        let slopes = here.into_iter().map(|head| rule.slope(head)).collect();
        let sinks = match rule.sinks {
            Some(sinks) => {
                let held = position.numbers_of_heads(self.info(sinks), info);
                Some(self.tensor(sinks)?.f32()[held].to_vec())
            }
            None => None,
        };
        Ok(Weighting {
            sinks,
            scale: rule.scale as f32,
            cap: rule.cap.map(|c| c as f32),
            slopes,
        })
    }

    pub(super) fn attention_context(&mut self, op: &Op, shape: &AttentionShape) -> Result<()> {
        let [w, v] = [op.inputs[0], op.inputs[1]];
        let positions = self.scores_positions(w);
        let heads = self.heads_of_scores(shape, &positions, self.tensor(w)?);
        self.weighted_keys(&heads, [w, v], shape.v_dim as usize, op.outputs[0])
    }

    /// Concatenates every head's own columns with the columns that all heads share, as in MLA.
    pub(super) fn join(&mut self, op: &Op, [own, shared]: [usize; 2]) -> Result<()> {
        let (x, more) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let heads = x.columns() / own;
        let (shape, rows) = (x.with_columns(heads * (own + shared)), x.rows());
        let (x, more) = (x.f32(), more.f32());
        let mut out = Vec::with_capacity(rows * heads * (own + shared));
        for row in 0..rows {
            for head in x[row * heads * own..][..heads * own].chunks(own) {
                out.extend_from_slice(head);
                out.extend_from_slice(&more[row * shared..][..shared]);
            }
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    /// Gradients of both parts of a join; the shared columns get the sum over heads.
    pub(super) fn join_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        [own, shared]: [usize; 2],
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let heads = dy.columns() / (own + shared);
        let shapes = [heads * own, shared].map(|columns| dy.with_columns(columns));
        let (rows, dy) = (dy.rows(), dy.f32());
        let head = |row: usize, h: usize| &dy[(row * heads + h) * (own + shared)..][..own + shared];
        let mut d_own = Vec::with_capacity(rows * heads * own);
        for row in 0..rows {
            for h in 0..heads {
                d_own.extend_from_slice(&head(row, h)[..own]);
            }
        }
        let of_head = |h: usize| -> Vec<f32> {
            let columns = (0..rows).flat_map(|row| head(row, h)[own..].iter().copied());
            columns.collect()
        };
        let [own_shape, shared_shape] = shapes;
        let dtype = self.info(op.outputs[1]).dtype;
        let value = if self.machine.is_exact() {
            let info = self.info(forward.inputs[0]);
            let last = info.global.len() - 1;
            let position = &self.machine.position;
            let held = position.indices(&info.global, &info.placements, last);
            let mut sum = TreeSum::default();
            for h in 0..heads {
                sum.leaf(held[h * own] / own as u64, of_head(h));
            }
            let whole = held.len() as u64 == info.global[last];
            Value::summed(sum, shared_shape, dtype, whole)
        } else {
            let mut sum = vec![0.0; rows * shared];
            for h in 0..heads {
                add(&mut sum, &of_head(h));
            }
            Value::Tensor(Tensor::new(shared_shape, sum, dtype))
        };
        self.set(op.outputs[1], value);
        self.put_tensor(op.outputs[0], own_shape, d_own);
        Ok(())
    }

    /// Positions of the query dim of `[b, heads, q, kv]`.
    fn scores_positions(&self, scores: TensorId) -> Vec<u64> {
        let info = self.info(scores);
        let position = &self.machine.position;
        position.indices(&info.global, &info.placements, 2)
    }

    fn heads_of_scores<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        scores: &Tensor,
    ) -> Heads<'p> {
        self.heads(shape, positions, [scores.shape[0], scores.shape[1]])
    }

    fn heads<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        [batch, heads]: [usize; 2],
    ) -> Heads<'p> {
        Heads {
            batch,
            heads,
            kv_heads: (heads as u64 * shape.kv_heads / shape.heads) as usize,
            kv_len: shape.kv_len as usize,
            positions,
            window: shape.window,
            exact: self.machine.is_exact(),
            threads: self.threads(),
        }
    }

    /// Keys or values of the whole sequence: the tensor itself, or what the ring gathered.
    fn keys(&self, id: TensorId) -> Result<&Tensor> {
        match self.ring.get(&self.block.storage(id)).map(AsRef::as_ref) {
            Some(Value::Tensor(x)) => Ok(x),
            _ => self.tensor(id),
        }
    }

    pub(super) fn gather_ring(&mut self, scope: &str, id: TensorId) -> Result<()> {
        let storage = self.block.storage(id);
        let whole = self.machine.ring(scope, self.tensor(id)?, self.info(id))?;
        self.ring.insert(storage, Arc::new(Value::Tensor(whole)));
        Ok(())
    }

    /// Gradient of one factor of the scores or of the context: of queries or keys from those of the scores, laid out as
    /// `[b, h, q, k]`; of weights or values from those of the context, laid out as `[b, q, h·d]`.
    pub(super) fn product_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        (shape, piece): (&AttentionShape, AttentionPiece),
        factor: Factor,
    ) -> Result<()> {
        let of_scores = piece == AttentionPiece::Scores;
        let [gradient, other] = [op.inputs[0], op.inputs[1]];
        let (weights, dim, factors) = match of_scores {
            true => (gradient, shape.qk_dim as usize, [gradient, other]),
            false => (forward.inputs[0], shape.v_dim as usize, [other, gradient]),
        };
        let positions = self.scores_positions(weights);
        let heads = self.heads_of_scores(shape, &positions, self.tensor(weights)?);
        let out = op.outputs[0];
        if factor == Factor::Second {
            let value = self.key_gradient(op, forward, (&heads, factors, dim))?;
            self.set(out, value);
            return Ok(());
        }
        self.keys_again(forward)?;
        match of_scores {
            true => self.weighted_keys(&heads, [gradient, other], dim, out),
            false => self.rows_by_keys(&heads, [gradient, other], dim, out),
        }
    }

    /// Gathers keys or values round the ring again for backward, if attention uses the ring.
    fn keys_again(&mut self, forward: &Op) -> Result<()> {
        let key = forward.inputs[1];
        if self.block.has_ring() && !self.ring.contains_key(&self.block.storage(key)) {
            self.gather_ring(&forward.scope, key)?;
        }
        Ok(())
    }

    /// The gradient of keys or values: the rows of `x`, weighted by `w`, summed over the queries of this rank; sent back
    /// round the ring to the ranks that hold them.
    fn key_gradient(
        &self,
        op: &Op<Gradient>,
        forward: &Op,
        (heads, [w, x], dim): (&Heads<'_>, [TensorId; 2], usize),
    ) -> Result<Value> {
        let dtype = self.info(op.outputs[0]).dtype;
        let (w, x) = (self.tensor(w)?.f32(), self.tensor(x)?.f32());
        let shape = vec![heads.batch, heads.kv_len, heads.kv_heads * dim];
        let value = if self.machine.is_exact() {
            let seq_len = self.batch.seq_len;
            let leaves = self.machine.position_leaves(heads.positions, seq_len)?;
            let sum = heads.weighted_rows_tree(&w, &x, dim, &leaves);
            let whole = heads.positions.len() >= heads.kv_len;
            Value::summed(sum, shape, dtype, whole)
        } else {
            let data = heads.weighted_rows(&w, &x, dim);
            Value::Tensor(Tensor::new(shape, data, dtype))
        };
        if !self.block.has_ring() {
            return Ok(value);
        }
        let info = self.info(forward.inputs[1]);
        let to = info.placements.on(Axis::Cp);
        let moves = (Axis::Cp, Placement::Partial, to);
        self.machine
            .redistribute(&forward.scope, &value, info, moves)
    }
}
