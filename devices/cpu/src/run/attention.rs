//! Core attention of a pass: scores, softmax, context, and the context-parallel ring.

use super::state::Run;
use crate::attention::{Heads, Weighting};
use crate::block::GradientSink;
use crate::machine::Result;
use crate::tensor::Tensor;
use crate::tokens;
use crate::tree::TreeSum;
use crate::value::{Terms, Value};
use catalog::{Axis, DType};
use dtensor::placement::Placement;
use dtensor::{AttentionShape, Factor, Gradient, Op, SoftmaxRule, TensorId};
use std::ops::Range;
use std::sync::Arc;

impl Run<'_> {
    pub(super) fn attention_scores(&mut self, op: &Op, shape: &AttentionShape) -> Result<()> {
        let (q, k) = (op.inputs[0], op.inputs[1]);
        let positions = self.query_positions(q);
        let heads = self.heads(shape, &positions, q)?;
        let keys = self.keys(k)?;
        let scores = heads.rows_by_keys(&self.tensor(q)?.f32(), &keys.f32(), shape.qk_dim as usize);
        let dims = vec![heads.batch, heads.heads, positions.len(), heads.kv_len];
        self.put_tensor(op.outputs[0], dims, scores);
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
        let rows = sequences * positions.len();
        let columns = part.len();
        if !self.machine.is_exact() {
            tokens::column_sum(0..rows, columns, &mut sink.plain(parameter)[part], value);
            return Ok(());
        }
        let leaves = self
            .machine
            .leaves_at(positions, sequences as u64, self.batch)?;
        let mut sum = TreeSum::default();
        for (leaf, rows) in leaves {
            let mut node = vec![0.0; columns];
            tokens::column_sum(rows, columns, &mut node, &value);
            sum.leaf(leaf, node);
        }
        sink.tree(parameter, part, sum);
        Ok(())
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
        let (w, v) = (op.inputs[0], op.inputs[1]);
        let weights = self.tensor(w)?;
        let positions = self.scores_positions(w);
        let heads = self.heads_of_scores(shape, &positions, weights);
        let values = self.keys(v)?;
        let dim = shape.v_dim as usize;
        let out = heads.weighted_keys(&weights.f32(), &values.f32(), dim);
        let dims = vec![heads.batch, positions.len(), heads.heads * dim];
        self.put_tensor(op.outputs[0], dims, out);
        Ok(())
    }

    /// Concatenates every head's own columns with the columns that all heads share, as in MLA.
    pub(super) fn join(&mut self, op: &Op, [own, shared]: [usize; 2]) -> Result<()> {
        let (x, more) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let heads = x.columns() / own;
        let (mut shape, rows) = (x.shape.clone(), x.rows());
        *shape.last_mut().expect("keys have columns") = heads * (own + shared);
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

    /// Gradients of both parts of a join; that of the shared columns is a sum over heads.
    pub(super) fn join_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        [own, shared]: [usize; 2],
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let heads = dy.columns() / (own + shared);
        let (shape, rows) = (dy.shape.clone(), dy.rows());
        let dy = dy.f32();
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
        let with = |columns: usize| {
            let mut shape = shape.clone();
            *shape.last_mut().expect("keys have columns") = columns;
            shape
        };
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
            let terms = Terms {
                terms: vec![sum],
                shape: with(shared),
                dtype,
            };
            if whole {
                Value::Tensor(terms.reduce())
            } else {
                Value::Terms(terms)
            }
        } else {
            let mut sum = vec![0.0; rows * shared];
            for h in 0..heads {
                for (a, b) in sum.iter_mut().zip(of_head(h)) {
                    *a += b;
                }
            }
            Value::Tensor(Tensor::new(with(shared), sum, dtype))
        };
        self.set(op.outputs[1], value);
        self.put_tensor(op.outputs[0], with(heads * own), d_own);
        Ok(())
    }

    fn query_positions(&self, q: TensorId) -> Vec<u64> {
        let info = self.info(q);
        self.machine.positions(&info.global, &info.placements)
    }

    /// Positions of the query dim of `[b, heads, q, kv]`.
    fn scores_positions(&self, scores: TensorId) -> Vec<u64> {
        let info = self.info(scores);
        self.machine
            .position
            .indices(&info.global, &info.placements, 2)
    }

    fn heads<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        q: TensorId,
    ) -> Result<Heads<'p>> {
        let x = self.tensor(q)?;
        let heads = x.columns() / shape.qk_dim as usize;
        Ok(self.heads_with(shape, positions, x.shape[0], heads))
    }

    fn heads_of_scores<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        scores: &Tensor,
    ) -> Heads<'p> {
        self.heads_with(shape, positions, scores.shape[0], scores.shape[1])
    }

    fn heads_with<'p>(
        &self,
        shape: &AttentionShape,
        positions: &'p [u64],
        batch: usize,
        heads: usize,
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

    /// Gradients of queries or keys from those of the scores, laid out as `[b, h, q, k]`.
    pub(super) fn scores_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        shape: &AttentionShape,
        factor: Factor,
    ) -> Result<()> {
        let (gradient, other, dim) = (op.inputs[0], op.inputs[1], shape.qk_dim as usize);
        let positions = self.scores_positions(gradient);
        let heads = self.heads_of_scores(shape, &positions, self.tensor(gradient)?);
        let value = match factor {
            Factor::First => {
                self.keys_again(forward)?;
                let (w, k) = (self.tensor(gradient)?.f32(), self.keys(other)?.f32());
                let data = heads.weighted_keys(&w, &k, dim);
                let shape = vec![heads.batch, positions.len(), heads.heads * dim];
                Value::Tensor(Tensor::new(shape, data, self.info(op.outputs[0]).dtype))
            }
            Factor::Second => self.key_gradient(op, forward, (&heads, [gradient, other], dim))?,
        };
        self.set(op.outputs[0], value);
        Ok(())
    }

    /// Gradients of weights or values from those of the context, laid out as `[b, q, h·d]`.
    pub(super) fn context_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        shape: &AttentionShape,
        factor: Factor,
    ) -> Result<()> {
        let (gradient, other, dim) = (op.inputs[0], op.inputs[1], shape.v_dim as usize);
        let weights = forward.inputs[0];
        let positions = self.scores_positions(weights);
        let heads = self.heads_of_scores(shape, &positions, self.tensor(weights)?);
        let value = match factor {
            Factor::First => {
                self.keys_again(forward)?;
                let (d, v) = (self.tensor(gradient)?.f32(), self.keys(other)?.f32());
                let data = heads.rows_by_keys(&d, &v, dim);
                let shape = vec![heads.batch, heads.heads, positions.len(), heads.kv_len];
                Value::Tensor(Tensor::new(shape, data, self.info(op.outputs[0]).dtype))
            }
            Factor::Second => self.key_gradient(op, forward, (&heads, [other, gradient], dim))?,
        };
        self.set(op.outputs[0], value);
        Ok(())
    }

    /// Gathers keys or values round the ring again for backward, if attention uses the ring.
    fn keys_again(&mut self, forward: &Op) -> Result<()> {
        let key = forward.inputs[1];
        if self.block.has_ring() && !self.ring.contains_key(&self.block.storage(key)) {
            self.gather_ring(&forward.scope, key)?;
        }
        Ok(())
    }

    /// The gradient of keys or values, sent back to the ranks that hold them.
    fn key_gradient(
        &self,
        op: &Op<Gradient>,
        forward: &Op,
        (heads, factors, dim): (&Heads<'_>, [TensorId; 2], usize),
    ) -> Result<Value> {
        let dtype = self.info(op.outputs[0]).dtype;
        let value = self.summed_over_queries(heads, factors, dim, dtype)?;
        if self.block.has_ring() {
            return self.return_ring(forward, value);
        }
        Ok(value)
    }

    /// Gradients of keys or values: the rows of `x`, weighted by `w`, summed over the queries of this rank.
    fn summed_over_queries(
        &self,
        heads: &Heads<'_>,
        [w, x]: [TensorId; 2],
        dim: usize,
        dtype: DType,
    ) -> Result<Value> {
        let (w, x) = (self.tensor(w)?.f32(), self.tensor(x)?.f32());
        let shape = vec![heads.batch, heads.kv_len, heads.kv_heads * dim];
        if !self.machine.is_exact() {
            let data = heads.weighted_rows(&w, &x, dim);
            return Ok(Value::Tensor(Tensor::new(shape, data, dtype)));
        }
        let seq_len = self.batch.seq_len;
        let leaves = self.machine.position_leaves(heads.positions, seq_len)?;
        let terms = Terms {
            terms: vec![heads.weighted_rows_tree(&w, &x, dim, &leaves)],
            shape,
            dtype,
        };
        Ok(if heads.positions.len() < heads.kv_len {
            Value::Terms(terms)
        } else {
            Value::Tensor(terms.reduce())
        })
    }

    /// Sends gradients of keys or values back round the ring to the ranks that hold them.
    fn return_ring(&self, forward: &Op, value: Value) -> Result<Value> {
        let info = self.info(forward.inputs[1]);
        let to = info.placements.on(Axis::Cp);
        let moves = (Axis::Cp, Placement::Partial, to);
        self.machine
            .redistribute(&forward.scope, &value, info, moves)
    }
}
