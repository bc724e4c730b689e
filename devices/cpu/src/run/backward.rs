//! Backward of a pass: which kernel each traced operator runs.

use super::rows::dropped;
use super::state::Run;
use crate::block::GradientSink;
use crate::elementwise;
use crate::experts::weights_backward;
use crate::machine::{CpuError, Machine};
use crate::redistribute::put;
use crate::tensor::Tensor;
use crate::value::Value;
use dtensor::backward::GRADIENT_SUM;
use dtensor::trace::{CollectiveKind, Detail, Op, OpKind, Pass, View, ViewKind};
use std::sync::Arc;

impl Run<'_> {
    pub(super) fn backward_view(&mut self, view: &View) -> Result<(), CpuError> {
        let part = self.tensor(view.from)?.clone();
        match view.kind {
            ViewKind::Shard => {
                let shard = self
                    .machine
                    .shard(&part, self.info(view.from), self.info(view.to));
                self.set(view.to, Value::Tensor(shard));
            }
            ViewKind::Columns(cut) => {
                let whole = cut.whole(part.columns());
                let [columns, start, number] = cut.local(whole);
                let rows = part.len() / number.max(1);
                let mut shape = part.shape.clone();
                *shape.last_mut().expect("sliced tensors have a last dim") = whole;
                let mut data = match self.held.values.remove(&self.block.storage(view.to)) {
                    Some(value) => match Arc::unwrap_or_clone(value) {
                        Value::Tensor(x) => x.into_f32(),
                        _ => vec![0.0; rows * columns],
                    },
                    None => vec![0.0; rows * columns],
                };
                let at = [(0..rows).collect(), (start..start + number).collect()];
                put(&mut data, &[rows, columns], &at, &part.f32());
                self.put_tensor(view.to, shape, data);
            }
        }
        Ok(())
    }

    pub(super) fn backward_op(
        &mut self,
        op: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        if op.scope == GRADIENT_SUM {
            return self.gradient_sum(op);
        }
        let Detail::Gradient { of, input } = op.detail else {
            return match op.kind {
                OpKind::Collective(c) => self.collective(op, c.kind),
                _ => Err(Machine::unsupported(op, "a gradient of nothing")),
            };
        };
        let block = self.block;
        let forward = &block.trace.forward[of];
        match (op.kind, op.pass) {
            (OpKind::Matmul { .. }, Pass::BackwardWeight) => {
                self.linear_backward_weight(op, forward, sink)
            }
            (OpKind::Matmul { .. }, _) => self.linear_backward_input(op),
            (OpKind::GroupedMatmul { .. }, Pass::BackwardWeight) => {
                self.grouped_backward_weight(op, forward, sink)
            }
            (OpKind::GroupedMatmul { .. }, _) => {
                self.grouped_product(op, (op.inputs[0], op.inputs[1], op.outputs[0]), true)
            }
            (OpKind::AttentionScores(shape) | OpKind::AttentionContext(shape), _) => {
                self.attention_backward(op, forward, input.unwrap_or(0), &shape)
            }
            (OpKind::Softmax(shape), _) => self.softmax_backward(op, forward, &shape, sink),
            (OpKind::Norm, _) => self.norm_backward(op, forward, sink),
            (OpKind::Activation { .. }, _) => self.activation_backward(op, forward),
            (OpKind::Scale, _) => self.scale_backward(op, forward),
            (OpKind::Bias, _) if forward.detail == Detail::ExpertBias => {
                self.expert_bias_backward(op, forward, sink)
            }
            (OpKind::Bias, _) => self.bias_backward(op, forward, sink),
            (OpKind::Dropout, _) => self.dropout_backward(op, forward),
            (OpKind::Rope, _) => self.rope(forward, true, op.inputs[0], op.outputs[0]),
            (OpKind::Copy, _) if matches!(forward.detail, Detail::Join { .. }) => {
                self.join_backward(op, forward)
            }
            (OpKind::Copy, _) => self.copy(op.inputs[0], op.outputs[0]),
            (OpKind::Embedding, _) => self.embedding_backward(op, forward, sink),
            // Forward left the gradient in the logits' place.
            (OpKind::CrossEntropy, _) => self.copy(forward.inputs[0], op.outputs[0]),
            (OpKind::TopK, _) => self.top_k_backward(op, forward),
            (OpKind::Permute, _) => self.permute_backward(op, forward),
            (OpKind::Unpermute, _) => self.unpermute_backward(op, forward),
            // Gradients of keys and values went back as they were made.
            (OpKind::Collective(c), _) if c.kind == CollectiveKind::RingExchange => Ok(()),
            _ => Err(Machine::unsupported(op, "its backward")),
        }
    }

    fn embedding_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let Detail::Table { table, .. } = forward.detail else {
            return Err(Machine::unsupported(op, "no table"));
        };
        let dy = self.tensor(op.inputs[0])?;
        let columns = dy.columns();
        let dy = dy.f32();
        let at = (columns, self.first_row(table));
        // The gradient of a partial output is whole on every rank: rows go by the ids.
        self.table_gradient(sink, table, self.batch.ids, &dy, at, forward.inputs[0])
    }

    fn top_k_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let Detail::Route { router, .. } = forward.detail else {
            return Err(Machine::unsupported(op, "no rule of choice"));
        };
        let route = Arc::clone(self.routing(op)?);
        let logits = self.tensor(forward.inputs[0])?;
        let dy = self.tensor(op.inputs[0])?.f32();
        let chosen = (route.chosen.as_slice(), route.top_k);
        let out = weights_backward(&logits.f32(), route.experts, chosen, &router, &dy);
        let shape = logits.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn dropout_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let Detail::Dropout { probability } = forward.detail else {
            return Err(Machine::unsupported(op, "no probability"));
        };
        let dy = self.tensor(op.inputs[0])?;
        let Value::Mask(mask) = self.value(forward.outputs[1])? else {
            return Err(Machine::unsupported(op, "no mask"));
        };
        let out = dropped(&dy.f32(), mask, probability, self.threads());
        let shape = dy.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn gradient_sum(&mut self, op: &Op) -> Result<(), CpuError> {
        let (a, b) = (self.value(op.inputs[0])?, self.value(op.inputs[1])?);
        let value = match (a, b) {
            (Value::Tensor(a), Value::Tensor(b)) => {
                let mut data = a.f32().into_owned();
                let b = b.f32();
                elementwise::add(&mut data, &b, self.threads());
                let dtype = self.info(op.outputs[0]).dtype;
                Value::Tensor(Tensor::new(a.shape.clone(), data, dtype))
            }
            (Value::Terms(a), Value::Terms(b)) => {
                let mut sum = a.clone();
                sum.terms.extend(b.terms.iter().cloned());
                Value::Terms(sum)
            }
            _ => return Err(Machine::unsupported(op, "a partial and a whole gradient")),
        };
        self.set(op.outputs[0], value);
        Ok(())
    }
}
