//! Backward of a pass: which kernels each traced operator runs.

use super::machine::GradientSink;
use super::state::{Run, rounded, unsupported};
use crate::error::CudaError;
use crate::ops::NormGradient;
use crate::tensor::Tensor;
use dtensor::backward::GRADIENT_SUM;
use dtensor::trace::{CollectiveKind, Detail, Op, OpKind, Pass, TensorId, View, ViewKind};

impl Run<'_> {
    /// Writes the gradient of a part into that of the whole.
    pub(super) fn backward_view(&mut self, view: &View) -> Result<(), CudaError> {
        let ViewKind::Columns(cut) = view.kind else {
            return self.shard(view);
        };
        let part = self.tensor(view.from)?.clone();
        let whole = cut.whole(part.columns());
        let [columns, start, number] = cut.local(whole);
        if !self.held.values.contains_key(&self.block.storage(view.to)) {
            let mut shape = part.shape.clone();
            *shape.last_mut().expect("sliced tensors have a last dim") = whole;
            let zeros = self.device().zeros(shape, part.dtype)?;
            self.set(view.to, zeros);
        }
        let to = self.tensor(view.to)?;
        let grid = |x: &Tensor, columns: usize| {
            let rows = x.len() / columns.max(1);
            x.reshaped(vec![rows, columns])
        };
        self.device()
            .put_part(&grid(to, columns), start, &grid(&part, number))
    }

    pub(super) fn backward_op(
        &mut self,
        index: usize,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        let block = self.block;
        let op = &block.trace.backward[index];
        if op.scope == GRADIENT_SUM {
            return self.gradient_sum(op);
        }
        let Detail::Gradient { of, input } = op.detail else {
            return match op.kind {
                OpKind::Collective(c) => self.collective(op, c.kind),
                _ => Err(unsupported(op, "a gradient of nothing")),
            };
        };
        let forward = &block.trace.forward[of];
        if self.gelus && block.epilogues.is_gelu_gradient(index) {
            // Done by the product before.
            return Ok(());
        }
        if block.is_attention(of) {
            return match op.kind {
                OpKind::AttentionContext(shape) if input == Some(0) => {
                    self.attention_backward(op, of, &shape, sink)
                }
                // Done with the gradient of the probabilities.
                _ => Ok(()),
            };
        }
        match (op.kind, op.pass) {
            (OpKind::Matmul { .. }, Pass::BackwardWeight) => {
                self.weight_gradient(op, forward.inputs[1], sink)
            }
            (OpKind::Matmul { .. }, _) => self.linear_backward(index, op),
            (OpKind::GroupedMatmul { .. }, Pass::BackwardWeight) => {
                self.grouped_weight_gradient(op, forward.inputs[1], sink)
            }
            (OpKind::GroupedMatmul { .. }, _) => self.grouped_backward(op),
            (OpKind::Norm, _) => self.norm_backward(op, forward, sink),
            (OpKind::Activation { .. }, _) => self.activation_backward(op, forward),
            (OpKind::Scale, _) => self.scale_backward(op, forward),
            (OpKind::Bias, _) => self.bias_backward(op, forward, sink),
            (OpKind::Dropout, _) => self.dropout_backward(op, forward),
            (OpKind::Rope, _) => self.rope(forward, true, op.inputs[0], op.outputs[0]),
            (OpKind::Copy, _) => self.copied_backward(op, forward),
            (OpKind::Embedding, _) => self.embedding_backward(op, forward, sink),
            (OpKind::CrossEntropy, _) => {
                // Forward left the gradient in the logits' place.
                let gradient = self.tensor(forward.inputs[0])?.clone();
                self.set(op.outputs[0], gradient);
                Ok(())
            }
            // Gradients of keys and values went back as they were made.
            (OpKind::Collective(c), _) if c.kind == CollectiveKind::RingExchange => Ok(()),
            _ => self.expert_backward(op, forward),
        }
    }

    /// The gradient of a linear layer's weight, added to what `sink` has of it.
    fn weight_gradient(
        &self,
        op: &Op,
        weight: TensorId,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        if self.block.trace.is_eight_bit(op) {
            return self.weight_gradient8(op, weight, sink);
        }
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let gradient = sink.gradient(weight);
        self.device().add_linear_gradient(&gradient, dy, x)
    }

    /// The gradient of a linear layer's input, or of what that is the GELU of.
    fn linear_backward(&mut self, index: usize, op: &Op) -> Result<(), CudaError> {
        let trace = &self.block.trace;
        if trace.is_eight_bit(op) {
            let dx = self.linear_backward8(op)?;
            self.set(op.outputs[0], dx);
            return Ok(());
        }
        let (dy, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let gelu = self.block.epilogues.gelu_gradient(index);
        if let Some(gelu) = gelu.filter(|_| self.gelus).map(|i| &trace.backward[i]) {
            // Its backward reads the gradient and what it was taken of.
            let input = self.tensor(gelu.inputs[1])?;
            let dx = self.device().linear_gelu_backward(dy, w, input)?;
            self.set(gelu.outputs[0], dx);
            return Ok(());
        }
        let dtype = self.info(op.outputs[0]).dtype;
        let dx = self.device().linear_backward(dy, w, dtype)?;
        self.set(op.outputs[0], dx);
        Ok(())
    }

    /// The gradients of experts' weights, added to what `sink` has of them.
    fn grouped_weight_gradient(
        &self,
        op: &Op,
        weight: TensorId,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        let route = self.routing(op)?;
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let gradient = sink.gradient(weight);
        route.at_experts(|at| self.device().add_grouped_gradient(at, &gradient, dy, x))
    }

    /// The gradient of the rows that experts' products read.
    fn grouped_backward(&mut self, op: &Op) -> Result<(), CudaError> {
        let route = self.routing(op)?;
        let (dy, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let dx = route.at_experts(|at| self.device().grouped(at, dy, w, true))?;
        self.set(op.outputs[0], dx);
        Ok(())
    }

    /// The sum of what two readers of a tensor give it.
    fn gradient_sum(&mut self, op: &Op) -> Result<(), CudaError> {
        let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let sum = self.device().add(a, b)?;
        self.set(op.outputs[0], sum);
        Ok(())
    }

    fn embedding_backward(
        &self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        let Detail::Table { table, .. } = forward.detail else {
            return Err(unsupported(op, "no table"));
        };
        let dy = self.tensor(op.inputs[0])?;
        let first = self.first_index(table, 0);
        let gradient = sink.gradient(table);
        let rows = first..first + gradient.rows() as u64;
        let order = self.batch.row_order(self.device(), rows)?;
        self.device().add_embedding_gradient(&gradient, dy, &order)
    }

    fn expert_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CudaError> {
        match op.kind {
            OpKind::TopK => {
                let Detail::Route { router, .. } = forward.detail else {
                    return Err(unsupported(op, "no rule of choice"));
                };
                let route = self.routing(op)?;
                let (d, logits) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
                let choice = (logits, self.tensor(forward.outputs[0])?);
                let out = self.device().route_backward(&route, d, choice, &router)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            OpKind::Permute => {
                let route = self.routing(op)?;
                let dy = self.tensor(op.inputs[0])?;
                let shape = self.tokens_shape(forward.inputs[0], route.tokens, dy.columns());
                let out = self.device().combine(&route, dy, None, shape)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            OpKind::Unpermute => {
                let route = self.routing(op)?;
                let dy = self.tensor(op.inputs[0])?;
                let rows = self.tensor(forward.inputs[0])?;
                let p = self.tensor(forward.inputs[1])?;
                let [d_rows, d_p] = self.device().combine_backward(&route, dy, rows, p)?;
                self.set(op.outputs[0], d_rows);
                self.set(op.outputs[1], d_p);
                Ok(())
            }
            _ => Err(unsupported(op, "its backward")),
        }
    }

    fn norm_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        let Detail::Norm {
            kind,
            bias,
            from_one,
            ..
        } = forward.detail
        else {
            return Err(unsupported(op, "a norm without its kind"));
        };
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
        let weight = self.tensor(forward.inputs[1])?;
        let rows = vec![x.len() / weight.len(), weight.len()];
        let (dy, rows) = (dy.reshaped(rows.clone()), x.reshaped(rows));
        let d_weight = sink.gradient(forward.inputs[1]);
        let d_bias = bias.map(|bias| sink.gradient(bias));
        let call = NormGradient {
            kind,
            from_one,
            dy: &dy,
            x: &rows,
            weight,
            statistics: self.tensor(forward.outputs[1])?,
            d_weight: &d_weight,
            d_bias: d_bias.as_ref(),
        };
        let out = op.outputs.first();
        let shape = x.shape.clone();
        let dx = self.device().norm_backward(&call, out.is_some())?;
        if let (Some(&out), Some(dx)) = (out, dx) {
            self.set(out, dx.reshaped(shape));
        }
        Ok(())
    }

    fn copied_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CudaError> {
        let dy = self.tensor(op.inputs[0])?;
        if let Detail::Join { own, shared } = forward.detail {
            let widths = [own, shared].map(|n| n as usize);
            let [own, shared] = self.device().join_backward(dy, widths[0], widths[1])?;
            self.set(op.outputs[0], own);
            self.set(op.outputs[1], shared);
            return Ok(());
        }
        let dtype = self.info(op.outputs[0]).dtype;
        let dx = if dy.dtype == dtype {
            dy.clone()
        } else {
            self.device().cast(dy, dtype)?
        };
        self.set(op.outputs[0], dx);
        Ok(())
    }

    fn scale_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CudaError> {
        let dy = self.tensor(op.inputs[0])?;
        let dx = match forward.detail {
            Detail::Scale { factor } => self.device().scale(dy, rounded(factor, dy.dtype))?,
            Detail::Gate => {
                let [x, gate] = [forward.inputs[0], forward.inputs[1]];
                let (x, gate) = (self.tensor(x)?, self.tensor(gate)?);
                let [dx, d_gate] = self.device().gate_rows_backward(dy, x, gate)?;
                self.set(op.outputs[1], d_gate);
                dx
            }
            _ => return Err(unsupported(op, "no factor")),
        };
        self.set(op.outputs[0], dx);
        Ok(())
    }

    fn activation_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CudaError> {
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
        let up = match forward.inputs.get(1) {
            Some(&up) => Some(self.tensor(up)?),
            None => None,
        };
        let gated = matches!(forward.kind, OpKind::Activation { gated: true });
        let device = self.device();
        let (dx, d_up) = match (forward.detail, up) {
            (Detail::Cap { bound }, _) => (device.cap_backward(dy, x, bound as f32)?, None),
            (Detail::BoundedGlu { limit }, Some(up)) => {
                let [d_gate, d_up] = device.bounded_glu_backward(dy, x, up, limit as f32)?;
                (d_gate, Some(d_up))
            }
            _ if gated => device.gated_backward(Self::nonlinearity(forward)?, dy, x, up)?,
            _ => {
                let f = Self::nonlinearity(forward)?;
                (device.activation_backward(f, dy, x)?, None)
            }
        };
        self.set(op.outputs[0], dx);
        if let Some(d_up) = d_up {
            self.set(op.outputs[1], d_up);
        }
        Ok(())
    }

    fn bias_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        let dy = self.tensor(op.inputs[0])?;
        if forward.detail == Detail::ExpertBias {
            let route = self.routing(op)?;
            let gradient = sink.gradient(forward.inputs[1]);
            let device = self.device();
            return route.at_experts(|at| device.add_expert_bias_gradient(at, &gradient, dy));
        }
        let Detail::Table { table, first } = forward.detail else {
            return self
                .device()
                .add_column_sum(&sink.gradient(forward.inputs[1]), dy);
        };
        let info = self.info(forward.inputs[0]);
        // Positions count from a row of the table on.
        let (whole, first) = (sink.gradient(table), first as usize);
        let (rows, columns) = (whole.rows() - first, whole.columns());
        let gradient = whole.part(first * columns, vec![rows, columns]);
        let order = self.machine.position_order(info, rows as u64)?;
        self.device().add_embedding_gradient(&gradient, dy, &order)
    }

    fn dropout_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CudaError> {
        let Detail::Dropout { probability } = forward.detail else {
            return Err(unsupported(op, "no probability"));
        };
        let (dy, mask) = (self.tensor(op.inputs[0])?, self.tensor(forward.outputs[1])?);
        let scale = (1.0 / (1.0 - probability)) as f32;
        let dx = self.device().masked(dy, mask, scale)?;
        self.set(op.outputs[0], dx);
        Ok(())
    }
}
