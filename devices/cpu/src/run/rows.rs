//! Norms, nonlinearities, biases, dropout and rotary positions of a pass.

use super::forward::untrained;
use super::state::Run;
use crate::block::GradientSink;
use crate::machine::{Machine, Result};
use crate::math::{add, row_sum, sigmoid, tanh};
use crate::nonlinear;
use crate::tensor::Tensor;
use crate::tree::TreeSum;
use crate::value::Value;
use crate::{elementwise, tokens};
use catalog::model::{NormKind, Temperature};
use dtensor::{GatedUnit, Gradient, Norm, Op, Pointwise, Rotary, TensorId};
use std::borrow::Cow;

impl Run<'_> {
    pub(super) fn norm(&mut self, op: &Op, norm: &Norm) -> Result<()> {
        let x = self.tensor(op.inputs[0])?;
        let w = self.norm_factor(op.inputs[1], norm.from_one)?;
        let data = x.f32();
        let statistics = elementwise::statistics(&data, w.len(), norm.kind, norm.epsilon);
        let bias = norm.bias.map(|b| self.parameters.parameter(b).f32());
        let out = elementwise::norm(&data, &w, bias.as_deref(), &statistics, self.threads());
        let shape = x.shape.clone();
        let rows = statistics.len();
        let (columns, kept) = match norm.kind {
            NormKind::LayerNorm => (2, statistics.into_flattened()),
            NormKind::RmsNorm => (1, statistics.iter().map(|s| s[1]).collect()),
        };
        self.put_tensor(op.outputs[0], shape, out);
        self.put_tensor(op.outputs[1], vec![rows, columns], kept);
        Ok(())
    }

    pub(super) fn norm_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        norm: &Norm,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
        let w = self.norm_factor(forward.inputs[1], norm.from_one)?;
        let columns = w.len();
        let kept = self.tensor(forward.outputs[1])?.f32();
        let statistics: Vec<[f32; 2]> = match norm.kind {
            NormKind::LayerNorm => kept.chunks(2).map(|s| [s[0], s[1]]).collect(),
            NormKind::RmsNorm => kept.iter().map(|&r| [0.0, r]).collect(),
        };
        let shape = x.shape.clone();
        let (dy, data) = (dy.f32(), x.f32());
        let dx = elementwise::norm_backward(&dy, &data, &w, &statistics, norm.kind, self.threads());
        let hat = |row: usize, j: usize| {
            let [mean, r] = statistics[row];
            dy[row * columns + j] * ((data[row * columns + j] - mean) * r)
        };
        let sizes = (columns, x.columns() / columns);
        self.token_sum(sink, forward.inputs[1], forward.inputs[0], sizes, hat)?;
        if let Some(bias) = norm.bias {
            let plain = |row: usize, j: usize| dy[row * columns + j];
            self.token_sum(sink, bias, forward.inputs[0], sizes, plain)?;
        }
        if let Some(&out) = op.outputs.first() {
            self.put_tensor(out, shape, dx);
        }
        Ok(())
    }

    /// Adds the sum of `value(row, column)` over the rows of `like` to a vector parameter's
    /// gradient. A row of `like` is `heads` rows of `columns`. Exact mode has a leaf for every
    /// token leaf and head, because either may be sharded.
    pub(super) fn token_sum(
        &self,
        sink: &mut dyn GradientSink,
        parameter: TensorId,
        like: TensorId,
        (columns, heads): (usize, usize),
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<()> {
        let info = self.info(like);
        if self.machine.is_exact() {
            let position = &self.machine.position;
            let width = info.global.len() - 1;
            let each = self.info(parameter).global[0];
            let all = info.global[width] / each;
            let local = position.indices(&info.global, &info.placements, width);
            let mut sum = TreeSum::default();
            for (leaf, rows) in self.machine.token_leaves(info, self.batch)? {
                for head in 0..heads {
                    let mut node = vec![0.0; columns];
                    let rows = rows.clone().map(|row| row * heads + head);
                    tokens::column_sum(rows, &mut node, &value);
                    let global = local.get(head * columns).map_or(0, |column| column / each);
                    sum.leaf(leaf * all + global, node);
                }
            }
            sink.tree(parameter, 0..columns, sum);
        } else {
            let rows = 0..info.global[0] as usize * self.positions_of(like).len() * heads;
            tokens::column_sum(rows, sink.plain(parameter), value);
        }
        Ok(())
    }

    /// The factor of a norm: its weight, or one plus the weight where `from_one`.
    fn norm_factor(&self, weight: TensorId, from_one: bool) -> Result<Cow<'_, [f32]>> {
        let weight = self.tensor(weight)?.f32();
        Ok(if from_one {
            Cow::Owned(weight.iter().map(|w| 1.0 + w).collect())
        } else {
            weight
        })
    }

    pub(super) fn pointwise(&mut self, op: &Op, pointwise: Pointwise) -> Result<()> {
        let threads = self.threads();
        let x = self.tensor(op.inputs[0])?;
        let mut shape = x.shape.clone();
        let copied = || x.f32().into_owned();
        let out = match pointwise {
            Pointwise::Activation(function) => {
                let (f, mut out) = (nonlinear::kernels(function), copied());
                elementwise::each_block(&mut out, threads, |_, x| f.forward(x));
                out
            }
            Pointwise::Gated(unit) => self.gated(x, self.tensor(op.inputs[1])?, unit),
            Pointwise::FusedGated(unit) => {
                *shape.last_mut().expect("activations have a last dim") /= 2;
                self.fused_gated(x, unit)
            }
            Pointwise::Cap(bound) => {
                let (cap, mut out) = (bound as f32, copied());
                elementwise::each_block(&mut out, threads, |_, x| {
                    x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap));
                });
                out
            }
            Pointwise::Scale(factor) => scaled(x, factor),
            Pointwise::Temperature(of) => self.by_position(x, op.inputs[0], of),
            Pointwise::UnitNorm { width, epsilon } => self.unit_norm(x, width as usize, epsilon),
            Pointwise::Gate => self.gated_rows(copied(), op.inputs[1])?,
            Pointwise::SigmoidGate => return Err(untrained("sigmoid gate", &op.scope)),
            Pointwise::Bias => {
                let b = self.tensor(op.inputs[1])?.f32();
                let mut out = copied();
                elementwise::each_row(&mut out, x.columns(), threads, |_, y| add(y, &b));
                out
            }
            Pointwise::Copy => copied(),
            Pointwise::Rope(rotary) => self.turned(x, op.inputs[0], &rotary, false),
            Pointwise::Dropout(probability) => return self.dropout(op, probability),
            Pointwise::Join { own, shared } => {
                return self.join(op, [own, shared].map(|n| n as usize));
            }
        };
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn gated(&self, gate: &Tensor, up: &Tensor, unit: GatedUnit) -> Vec<f32> {
        let (gate, up) = (gate.f32(), up.f32());
        let mut out = vec![0.0; gate.len()];
        elementwise::each_block(&mut out, self.threads(), |first, out| {
            nonlinear::gated(unit, out, &gate[first..], &up[first..]);
        });
        out
    }

    fn fused_gated(&self, both: &Tensor, unit: GatedUnit) -> Vec<f32> {
        let (rows, columns) = (both.rows(), both.columns() / 2);
        let both = both.f32();
        let mut out = vec![0.0; rows * columns];
        elementwise::each_row(&mut out, columns, self.threads(), |row, out| {
            let (gate, up) = both[row * 2 * columns..][..2 * columns].split_at(columns);
            nonlinear::gated(unit, out, gate, up);
        });
        out
    }

    pub(super) fn pointwise_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        pointwise: Pointwise,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let mut shape = dy.shape.clone();
        let out = match pointwise {
            Pointwise::Activation(function) => {
                let f = nonlinear::kernels(function);
                self.derivative(dy, forward, |x, dy| f.backward(x, dy))?
            }
            Pointwise::Cap(bound) => {
                let cap = bound as f32;
                self.derivative(dy, forward, |x, dy| {
                    for (x, d) in x.iter_mut().zip(dy) {
                        let t = tanh(*x / cap);
                        *x = d * (1.0 - t * t);
                    }
                })?
            }
            Pointwise::Gated(unit) => {
                return self.both_derivatives(op, forward, |gate, up, dy| {
                    nonlinear::gated_backward(unit, gate, up, dy);
                });
            }
            Pointwise::FusedGated(unit) => {
                shape = dy.with_columns(2 * dy.columns());
                self.fused_gated_backward(dy, forward, unit)?
            }
            Pointwise::Scale(factor) => scaled(dy, factor),
            Pointwise::Temperature(of) => self.by_position(dy, forward.inputs[0], of),
            Pointwise::UnitNorm { width, epsilon } => {
                self.unit_norm_backward(dy, forward, (width as usize, epsilon))?
            }
            Pointwise::Gate => return self.gate_backward(op, forward),
            Pointwise::SigmoidGate => return Err(untrained("sigmoid gate", &op.scope)),
            Pointwise::Bias => {
                let (dy, columns) = (dy.f32(), dy.columns());
                let value = |row: usize, j: usize| dy[row * columns + j];
                let (bias, like) = (forward.inputs[1], forward.inputs[0]);
                return self.token_sum(sink, bias, like, (columns, 1), value);
            }
            Pointwise::Copy => dy.f32().into_owned(),
            Pointwise::Rope(rotary) => self.turned(dy, forward.inputs[0], &rotary, true),
            Pointwise::Dropout(p) => return self.dropout_backward(op, forward, p),
            Pointwise::Join { own, shared } => {
                return self.join_backward(op, forward, [own, shared].map(|n| n as usize));
            }
        };
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    /// The gradient of an elementwise function: `each(x, dy)` overwrites inputs by their gradients.
    fn derivative(
        &self,
        dy: &Tensor,
        forward: &Op,
        each: impl Fn(&mut [f32], &[f32]) + Sync,
    ) -> Result<Vec<f32>> {
        let (dy, mut out) = (dy.f32(), self.tensor(forward.inputs[0])?.f32().into_owned());
        elementwise::each_block(&mut out, self.threads(), |first, x| each(x, &dy[first..]));
        Ok(out)
    }

    /// The gradients of a gated function: `both` turns the gate and up projections into their gradients, in place.
    fn both_derivatives(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        both: impl Fn(&mut [f32], &mut [f32], &[f32]),
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?.f32();
        let (gate, up) = (
            self.tensor(forward.inputs[0])?,
            self.tensor(forward.inputs[1])?,
        );
        let shape = gate.shape.clone();
        let (mut gate, mut up) = (gate.f32().into_owned(), up.f32().into_owned());
        both(&mut gate, &mut up, &dy);
        self.put_tensor(op.outputs[0], shape.clone(), gate);
        self.put_tensor(op.outputs[1], shape, up);
        Ok(())
    }

    fn fused_gated_backward(&self, dy: &Tensor, forward: &Op, unit: GatedUnit) -> Result<Vec<f32>> {
        let mut out = self.tensor(forward.inputs[0])?.f32().into_owned();
        let (columns, dy) = (dy.columns(), dy.f32());
        elementwise::each_row(&mut out, 2 * columns, self.threads(), |row, both| {
            let (gate, up) = both.split_at_mut(columns);
            nonlinear::gated_backward(unit, gate, up, &dy[row * columns..]);
        });
        Ok(out)
    }

    fn gate_backward(&mut self, op: &Op<Gradient>, forward: &Op) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let gate = self.tensor(forward.inputs[1])?;
        let x = self.tensor(forward.inputs[0])?.f32();
        let (shape, columns) = (dy.shape.clone(), dy.columns());
        let dy = dy.f32().into_owned();
        let of_gate = |(row, g): (usize, &f32)| {
            let range = row * columns..(row + 1) * columns;
            let along = dy[range.clone()].iter().zip(&x[range]).map(|(d, x)| d * x);
            let s = sigmoid(*g);
            row_sum(along) * s * (1.0 - s)
        };
        let d_gate = gate.f32().iter().enumerate().map(of_gate).collect();
        let gate_shape = gate.shape.clone();
        let d_x = self.gated_rows(dy, forward.inputs[1])?;
        self.put_tensor(op.outputs[1], gate_shape, d_gate);
        self.put_tensor(op.outputs[0], shape, d_x);
        Ok(())
    }

    /// Multiplies every row by the sigmoid of its own gate.
    fn gated_rows(&self, mut x: Vec<f32>, gate: TensorId) -> Result<Vec<f32>> {
        let gate = self.tensor(gate)?.f32();
        let columns = x.len() / gate.len().max(1);
        elementwise::each_row(&mut x, columns, self.threads(), |row, out| {
            let factor = sigmoid(gate[row]);
            out.iter_mut().for_each(|x| *x *= factor);
        });
        Ok(x)
    }

    pub(super) fn dropout(&mut self, op: &Op, probability: f64) -> Result<()> {
        let x = self.tensor(op.inputs[0])?;
        let info = self.info(op.inputs[0]);
        let position = &self.machine.position;
        let mut indices = position.all_indices(&info.global, &info.placements);
        for b in &mut indices[0] {
            *b += self.batch.first_sequence;
        }
        let last = indices.pop().expect("dropout's input has dims");
        let strides = strides(&info.global);
        let first = |mut row: usize| {
            let mut index = 0;
            for (list, stride) in indices.iter().zip(&strides).rev() {
                index += list[row % list.len()] * stride;
                row /= list.len();
            }
            index
        };
        let mask = elementwise::mask(x.rows(), &last, first, probability, self.stream(op));
        let out = dropped(&x.f32(), &mask, probability, self.threads());
        let shape = x.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        self.set(op.outputs[1], Value::Mask(mask));
        Ok(())
    }

    pub(super) fn dropout_backward(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        probability: f64,
    ) -> Result<()> {
        let dy = self.tensor(op.inputs[0])?;
        let Value::Mask(mask) = self.value(forward.outputs[1])? else {
            return Err(Machine::unsupported("dropout", &op.scope, "no mask"));
        };
        let out = dropped(&dy.f32(), mask, probability, self.threads());
        let shape = dy.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn unit_norm(&self, x: &Tensor, width: usize, epsilon: f64) -> Vec<f32> {
        let (data, ones) = (x.f32(), vec![1.0; width]);
        let statistics = elementwise::statistics(&data, width, NormKind::RmsNorm, epsilon);
        elementwise::norm(&data, &ones, None, &statistics, self.threads())
    }

    fn unit_norm_backward(
        &self,
        dy: &Tensor,
        forward: &Op,
        (width, epsilon): (usize, f64),
    ) -> Result<Vec<f32>> {
        let data = self.tensor(forward.inputs[0])?.f32();
        let (kind, ones, threads) = (NormKind::RmsNorm, vec![1.0; width], self.threads());
        let statistics = elementwise::statistics(&data, width, kind, epsilon);
        let dy = dy.f32();
        let out = elementwise::norm_backward(&dy, &data, &ones, &statistics, kind, threads);
        Ok(out)
    }

    /// `x`, whose tokens are those of `like`, each multiplied by the factor of its position.
    fn by_position(&self, x: &Tensor, like: TensorId, temperature: Temperature) -> Vec<f32> {
        let positions = self.positions_of(like);
        let (columns, mut out) = (x.columns(), x.f32().into_owned());
        elementwise::each_row(&mut out, columns, self.threads(), |row, out| {
            let factor = temperature.factor(positions[row % positions.len()]) as f32;
            out.iter_mut().for_each(|x| *x *= factor);
        });
        out
    }

    /// `x`, whose tokens are those of `like`, with rotary embedding applied, or undone in backward.
    fn turned(&self, x: &Tensor, like: TensorId, rotary: &Rotary, backward: bool) -> Vec<f32> {
        let positions = self.positions_of(like);
        let (columns, mut out) = (x.columns(), x.f32().into_owned());
        let rotation = elementwise::Rotation {
            head_dim: rotary.head_dim as usize,
            first: rotary.first as usize,
            neighbours: rotary.neighbours,
            frequencies: rotary.scaling.frequencies(rotary.theta, rotary.dims),
            magnitude: rotary.scaling.magnitude(),
            backward,
        };
        elementwise::rope(&mut out, columns, &rotation, &positions, self.threads());
        out
    }
}

/// Dropout: kept elements divided by the probability of keeping them, all others zero.
fn dropped(x: &[f32], mask: &[u8], probability: f64, threads: usize) -> Vec<f32> {
    let keep = (1.0 / (1.0 - probability)) as f32;
    let mut out = x.to_vec();
    elementwise::each_block(&mut out, threads, |first, out| {
        for (y, &kept) in out.iter_mut().zip(&mask[first..]) {
            *y = if kept == 0 { 0.0 } else { *y * keep };
        }
    });
    out
}

/// A tensor times a factor, which is rounded to the tensor's type.
fn scaled(x: &Tensor, factor: f64) -> Vec<f32> {
    let factor = Tensor::new(vec![1], vec![factor as f32], x.dtype()).f32()[0];
    x.f32().iter().map(|x| x * factor).collect()
}

/// Row-major strides of a shape.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1];
    }
    strides
}
