//! Backward of a pass: which kernels each traced operator runs.

use super::machine::GradientSink;
use super::state::{FUSED_BOUNDED, Run, UNTRAINED, no_kernel, rounded};
use crate::error::{CudaError, Result};
use crate::ops::NormGradient;
use crate::tensor::Tensor;
use dtensor::{
    AttentionPiece, Expert, Factor, GatedUnit, Gradient, Norm, Op, Pointwise, Product, TensorId,
    Token, View, ViewKind,
};

impl Run<'_> {
    /// Writes the gradient of a slice into the gradient of the whole tensor.
    pub(super) fn backward_view(&mut self, view: &View) -> Result<()> {
        let ViewKind::Columns(cut) = view.kind else {
            return self.shard(view);
        };
        let part = self.tensor(view.from)?.clone();
        let whole = cut.whole(part.columns());
        let [columns, start, number] = cut.local(whole);
        if !self.held.values.contains_key(&self.block.storage(view.to)) {
            let zeros = self.device().zeros(part.with_columns(whole), part.dtype)?;
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

    pub(super) fn backward_op(&mut self, index: usize, sink: &mut dyn GradientSink) -> Result<()> {
        let block = self.block;
        let op = &block.trace.backward[index];
        if self.gelus && block.epilogues.is_gelu_gradient(index) {
            // Fused into the preceding GEMM.
            return Ok(());
        }
        let forward = |of: usize| &block.trace.forward[of];
        match op.operator {
            Gradient::Product(of, product, factor) => {
                let weight = forward(of).inputs[1];
                match (product, factor) {
                    (Product::Matmul(..), Factor::First) => {
                        self.linear_backward(index, op, product)
                    }
                    (Product::Matmul(..), Factor::Second) => {
                        self.weight_gradient(op, (weight, product), sink)
                    }
                    (Product::GroupedMatmul(..), Factor::First) => self.grouped_backward(op),
                    (Product::GroupedMatmul(..), Factor::Second) => {
                        self.grouped_weight_gradient(op, weight, sink)
                    }
                }
            }
            Gradient::Attention(_, attention, factor) => match (attention.piece, factor) {
                (AttentionPiece::Context, Factor::First) => {
                    self.attention_backward(op, &attention, sink)
                }
                // Done together with the gradient of the attention weights.
                (AttentionPiece::Context, Factor::Second)
                | (
                    AttentionPiece::Scores
                    | AttentionPiece::Softmax(_)
                    | AttentionPiece::Dropout(_),
                    _,
                ) => Ok(()),
            },
            Gradient::Norm(of, norm) => self.norm_backward(op, forward(of), &norm, sink),
            Gradient::Pointwise(of, pointwise) => {
                self.pointwise_backward(op, forward(of), pointwise, sink)
            }
            Gradient::Token(of, token) => self.token_backward(op, forward(of), token, sink),
            Gradient::Expert(of, expert) => self.expert_backward(op, forward(of), expert, sink),
            Gradient::Recurrent(_, recurrent) => Err(CudaError::unsupported(
                recurrent.name(),
                &op.scope,
                UNTRAINED,
            )),
            Gradient::Sum => self.gradient_sum(op),
            Gradient::Exchange(exchange) => self.exchange(op, exchange),
            // The gradients of keys and values were sent back when they were made.
            Gradient::Ring(_) => Ok(()),
        }
    }

    /// Adds the gradient of a linear layer's weight to `sink`.
    fn weight_gradient(
        &self,
        op: &Op<Gradient>,
        (weight, product): (TensorId, Product),
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        if self.block.trace.is_eight_bit(product) {
            return self.weight_gradient8(op, weight, sink);
        }
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let gradient = sink.gradient(weight);
        self.device().add_linear_gradient(&gradient, dy, x)
    }

    /// The gradient of a linear layer's input, or of the GELU's input where the GELU is fused.
    fn linear_backward(&mut self, index: usize, op: &Op<Gradient>, product: Product) -> Result<()> {
        let trace = &self.block.trace;
        if trace.is_eight_bit(product) {
            let dx = self.linear_backward8(op)?;
            self.set(op.outputs[0], dx);
            return Ok(());
        }
        let (dy, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let gelu = self.block.epilogues.gelu_gradient(index);
        if let Some(gelu) = gelu.filter(|_| self.gelus).map(|i| &trace.backward[i]) {
            // The GELU's backward reads the gradient and the GELU's input.
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

    /// Adds the gradients of experts' weights to `sink`.
    fn grouped_weight_gradient(
        &self,
        op: &Op<Gradient>,
        weight: TensorId,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let route = self.routing(&op.scope)?;
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let gradient = sink.gradient(weight);
        route.at_experts(|at| self.device().add_grouped_gradient(at, &gradient, dy, x))
    }

    /// The gradient of the input rows of a grouped GEMM.
    fn grouped_backward(&mut self, op: &Op<Gradient>) -> Result<()> {
        let route = self.routing(&op.scope)?;
        let (dy, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let dx = route.at_experts(|at| self.device().grouped(at, dy, w, true))?;
        self.set(op.outputs[0], dx);
        Ok(())
    }

    /// Adds the gradients that two readers of a tensor contribute.
    fn gradient_sum(&mut self, op: &Op<Gradient>) -> Result<()> {
        let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let sum = self.device().add(a, b)?;
        self.set(op.outputs[0], sum);
        Ok(())
    }

    fn token_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        token: Token,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        match token {
            Token::Embedding(table) => {
                let dy = self.tensor(op.inputs[0])?;
                let first = self.first_index(table, 0);
                let gradient = sink.gradient(table);
                let rows = first..first + gradient.rows() as u64;
                let order = self.batch.row_order(self.device(), rows)?;
                self.device().add_embedding_gradient(&gradient, dy, &order)
            }
            Token::Positions { table, first } => {
                let dy = self.tensor(op.inputs[0])?;
                let info = self.info(forward.inputs[0]);
                // Positions start at row `first` of the table.
                let (whole, first) = (sink.gradient(table), first as usize);
                let (rows, columns) = (whole.rows() - first, whole.columns());
                let gradient = whole.part(first * columns, vec![rows, columns]);
                let order = self.machine.position_order(info, rows as u64)?;
                self.device().add_embedding_gradient(&gradient, dy, &order)
            }
            Token::CrossEntropy(_) => {
                // Forward wrote the gradient over the logits.
                let gradient = self.tensor(forward.inputs[0])?.clone();
                self.set(op.outputs[0], gradient);
                Ok(())
            }
        }
    }

    fn expert_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        expert: Expert,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let route = self.routing(&op.scope)?;
        let device = self.device();
        let dy = self.tensor(op.inputs[0])?;
        match expert {
            Expert::Route(rule) => {
                let logits = self.tensor(forward.inputs[0])?;
                let choice = (logits, self.tensor(forward.outputs[0])?);
                let out = device.route_backward(&route, dy, choice, &rule.router)?;
                self.set(op.outputs[0], out);
            }
            Expert::Permute => {
                let shape = self.tokens_shape(forward.inputs[0], route.tokens, dy.columns());
                let out = device.combine(&route, dy, None, shape)?;
                self.set(op.outputs[0], out);
            }
            Expert::WeightedPermute | Expert::PlainUnpermute => {
                return Err(no_kernel("routing that weighs inputs", &op.scope));
            }
            Expert::Unpermute => {
                let rows = self.tensor(forward.inputs[0])?;
                let p = self.tensor(forward.inputs[1])?;
                let [d_rows, d_p] = device.combine_backward(&route, dy, rows, p)?;
                self.set(op.outputs[0], d_rows);
                self.set(op.outputs[1], d_p);
            }
            Expert::Bias => {
                let gradient = sink.gradient(forward.inputs[1]);
                route.at_experts(|at| device.add_expert_bias_gradient(at, &gradient, dy))?;
            }
        }
        Ok(())
    }

    fn norm_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        norm: &Norm,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
        let weight = self.tensor(forward.inputs[1])?;
        let rows = vec![x.len() / weight.len(), weight.len()];
        let (dy, rows) = (dy.reshaped(rows.clone()), x.reshaped(rows));
        let d_weight = sink.gradient(forward.inputs[1]);
        let d_bias = norm.bias.map(|bias| sink.gradient(bias));
        let call = NormGradient {
            kind: norm.kind,
            from_one: norm.from_one,
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

    fn pointwise_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        pointwise: Pointwise,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let input = |i: usize| self.tensor(forward.inputs[i]);
        let device = self.device();
        let (dx, second) = match pointwise {
            Pointwise::Activation(function) => {
                (device.activation_backward(function, dy, input(0)?)?, None)
            }
            Pointwise::Gated(GatedUnit::Plain(function)) => {
                device.gated_backward(function, dy, input(0)?, Some(input(1)?))?
            }
            Pointwise::FusedGated(GatedUnit::Plain(function)) => {
                device.gated_backward(function, dy, input(0)?, None)?
            }
            Pointwise::FusedGated(GatedUnit::Bounded(_)) => {
                return Err(no_kernel(FUSED_BOUNDED, &op.scope));
            }
            Pointwise::Gated(GatedUnit::Bounded(limit)) => {
                let [d_gate, d_up] =
                    device.bounded_glu_backward(dy, input(0)?, input(1)?, limit as f32)?;
                (d_gate, Some(d_up))
            }
            Pointwise::Cap(bound) => (device.cap_backward(dy, input(0)?, bound as f32)?, None),
            Pointwise::Rope(rotary) => (self.turned(dy, forward.inputs[0], &rotary, true)?, None),
            Pointwise::Scale(factor) => (device.scale(dy, rounded(factor, dy.dtype))?, None),
            Pointwise::SigmoidGate => {
                return Err(CudaError::unsupported("sigmoid gate", &op.scope, UNTRAINED));
            }
            Pointwise::Temperature(_) => return Err(no_kernel("temperature", &op.scope)),
            Pointwise::UnitNorm { .. } => return Err(no_kernel("unit norm", &op.scope)),
            Pointwise::Gate => {
                let [dx, d_gate] = device.gate_rows_backward(dy, input(0)?, input(1)?)?;
                (dx, Some(d_gate))
            }
            Pointwise::Bias => {
                return device.add_column_sum(&sink.gradient(forward.inputs[1]), dy);
            }
            Pointwise::Dropout(probability) => {
                let mask = self.tensor(forward.outputs[1])?;
                let scale = (1.0 / (1.0 - probability)) as f32;
                (device.masked(dy, mask, scale)?, None)
            }
            Pointwise::Copy => (self.copied(dy, op.outputs[0], false)?, None),
            Pointwise::Join { own, shared } => {
                let [own, shared] = device.join_backward(dy, own as usize, shared as usize)?;
                (own, Some(shared))
            }
        };
        self.set(op.outputs[0], dx);
        if let Some(second) = second {
            self.set(op.outputs[1], second);
        }
        Ok(())
    }
}
