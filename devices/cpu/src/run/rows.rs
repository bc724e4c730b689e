//! Norms, nonlinearities, biases, dropout and rotary positions of a pass.

use super::state::Run;
use crate::block::GradientSink;
use crate::machine::{CpuError, Machine};
use crate::math::{row_sum, sigmoid, tanh};
use crate::nonlinear::{self, Nonlinear};
use crate::tensor::Tensor;
use crate::tree::TreeSum;
use crate::value::Value;
use crate::{elementwise, tokens};
use catalog::DType;
use catalog::model::NormKind;
use dtensor::trace::{Detail, Op, OpKind, TensorId};
use std::borrow::Cow;

impl Run<'_> {
    pub(super) fn norm(&mut self, op: &Op) -> Result<(), CpuError> {
        let Detail::Norm {
            kind,
            epsilon,
            bias,
            from_one,
        } = op.detail
        else {
            return Err(Machine::unsupported(op, "a norm without its kind"));
        };
        let x = self.tensor(op.inputs[0])?;
        let w = self.norm_factor(op.inputs[1], from_one)?;
        let data = x.f32();
        let statistics = elementwise::statistics(&data, w.len(), kind, epsilon);
        let bias = bias.map(|b| self.parameters.parameter(b).f32());
        let out = elementwise::norm(&data, &w, bias.as_deref(), &statistics, self.threads());
        let shape = x.shape.clone();
        let rows = statistics.len();
        let (columns, kept) = match kind {
            NormKind::LayerNorm => (2, statistics.into_flattened()),
            NormKind::RmsNorm => (1, statistics.iter().map(|s| s[1]).collect()),
        };
        self.put_tensor(op.outputs[0], shape, out);
        self.put_tensor(op.outputs[1], vec![rows, columns], kept);
        Ok(())
    }

    pub(super) fn norm_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let Detail::Norm {
            kind,
            bias,
            from_one,
            ..
        } = forward.detail
        else {
            return Err(Machine::unsupported(op, "a norm without its kind"));
        };
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(forward.inputs[0])?);
        let w = self.norm_factor(forward.inputs[1], from_one)?;
        let columns = w.len();
        let statistics: Vec<[f32; 2]> = match kind {
            NormKind::LayerNorm => {
                let kept = self.tensor(forward.outputs[1])?.f32();
                kept.chunks(2).map(|s| [s[0], s[1]]).collect()
            }
            NormKind::RmsNorm => {
                let kept = self.tensor(forward.outputs[1])?.f32();
                kept.iter().map(|&r| [0.0, r]).collect()
            }
        };
        let shape = x.shape.clone();
        let (dy, data) = (dy.f32(), x.f32());
        let dx = elementwise::norm_backward(&dy, &data, &w, &statistics, kind, self.threads());
        let hat = |row: usize, j: usize| {
            let [mean, r] = statistics[row];
            dy[row * columns + j] * ((data[row * columns + j] - mean) * r)
        };
        let sizes = (columns, x.columns() / columns);
        self.token_sum(sink, forward.inputs[1], forward.inputs[0], sizes, hat)?;
        if let Some(bias) = bias {
            let plain = |row: usize, j: usize| dy[row * columns + j];
            self.token_sum(sink, bias, forward.inputs[0], sizes, plain)?;
        }
        if let Some(&out) = op.outputs.first() {
            self.put_tensor(out, shape, dx);
        }
        Ok(())
    }

    /// Adds to a vector parameter's gradient the sum of `value(row, column)` over the rows of `like`,
    /// each of which is `heads` rows of `columns`. Exact mode has a leaf for every token leaf and
    /// head, because ranks may share out either.
    pub(super) fn token_sum(
        &self,
        sink: &mut dyn GradientSink,
        parameter: TensorId,
        like: TensorId,
        (columns, heads): (usize, usize),
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<(), CpuError> {
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
                    tokens::column_sum(rows, columns, &mut node, &value);
                    let global = local.get(head * columns).map_or(0, |column| column / each);
                    sum.leaf(leaf * all + global, node);
                }
            }
            sink.tree(parameter, 0..columns, sum);
        } else {
            let positions = self.machine.positions(&info.global, &info.placements);
            let rows = 0..info.global[0] as usize * positions.len() * heads;
            tokens::column_sum(rows, columns, sink.plain(parameter), value);
        }
        Ok(())
    }

    /// What a norm multiplies by.
    fn norm_factor(&self, weight: TensorId, from_one: bool) -> Result<Cow<'_, [f32]>, CpuError> {
        let weight = self.tensor(weight)?.f32();
        Ok(if from_one {
            Cow::Owned(weight.iter().map(|w| 1.0 + w).collect())
        } else {
            weight
        })
    }

    /// Multiplies by a number, or every row by the sigmoid of its own.
    pub(super) fn scale(&mut self, op: &Op) -> Result<(), CpuError> {
        let x = self.tensor(op.inputs[0])?;
        let out = match op.detail {
            Detail::Scale { factor } => {
                let factor = rounded(factor, x.dtype());
                x.f32().iter().map(|x| x * factor).collect()
            }
            Detail::Gate => self.gated_rows(&x.f32(), op.inputs[1])?,
            _ => return Err(Machine::unsupported(op, "no factor")),
        };
        let shape = x.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn scale_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let dy = self.tensor(op.inputs[0])?;
        let shape = dy.shape.clone();
        let out = match forward.detail {
            Detail::Scale { factor } => {
                let factor = rounded(factor, dy.dtype());
                dy.f32().iter().map(|d| d * factor).collect()
            }
            Detail::Gate => {
                let gate = self.tensor(forward.inputs[1])?;
                let x = self.tensor(forward.inputs[0])?.f32();
                let (dy, columns) = (dy.f32(), dy.columns());
                let of_gate = |(row, g): (usize, &f32)| {
                    let range = row * columns..(row + 1) * columns;
                    let along = dy[range.clone()].iter().zip(&x[range]).map(|(d, x)| d * x);
                    let s = sigmoid(*g);
                    row_sum(along) * s * (1.0 - s)
                };
                let d_gate = gate.f32().iter().enumerate().map(of_gate).collect();
                let d_x = self.gated_rows(&dy, forward.inputs[1])?;
                let gate_shape = gate.shape.clone();
                self.put_tensor(op.outputs[1], gate_shape, d_gate);
                d_x
            }
            _ => return Err(Machine::unsupported(op, "no factor")),
        };
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    fn gated_rows(&self, x: &[f32], gate: TensorId) -> Result<Vec<f32>, CpuError> {
        let gate = self.tensor(gate)?.f32();
        let columns = x.len() / gate.len().max(1);
        let mut out = x.to_vec();
        elementwise::each_row(&mut out, columns, self.threads(), |row, out| {
            let factor = sigmoid(gate[row]);
            out.iter_mut().for_each(|x| *x *= factor);
        });
        Ok(out)
    }

    fn function(op: &Op) -> Result<&'static dyn Nonlinear, CpuError> {
        match op.detail {
            Detail::Activation { function, tanh } => Ok(nonlinear::kernels(function, tanh)),
            _ => Err(Machine::unsupported(op, "an unnamed function")),
        }
    }

    pub(super) fn activation(&mut self, op: &Op, gated: bool) -> Result<(), CpuError> {
        let threads = self.threads();
        let x = self.tensor(op.inputs[0])?;
        let mut shape = x.shape.clone();
        if let Detail::Cap { bound } = op.detail {
            let cap = bound as f32;
            let mut out = x.f32().into_owned();
            elementwise::each_block(&mut out, threads, |_, x| {
                x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap));
            });
            self.put_tensor(op.outputs[0], shape, out);
            return Ok(());
        }
        if let Detail::BoundedGlu { limit } = op.detail {
            let up = self.tensor(op.inputs[1])?.f32();
            let mut out = x.f32().into_owned();
            elementwise::each_block(&mut out, threads, |first, gate| {
                nonlinear::bounded_glu(gate, &up[first..], limit as f32);
            });
            self.put_tensor(op.outputs[0], shape, out);
            return Ok(());
        }
        let f = Self::function(op)?;
        let data = x.f32();
        let mut out;
        if op.inputs.len() == 2 {
            let up = self.tensor(op.inputs[1])?.f32();
            out = vec![0.0; data.len()];
            elementwise::each_block(&mut out, threads, |first, out| {
                f.gated(out, &data[first..], &up[first..]);
            });
        } else if gated {
            let columns = x.columns() / 2;
            *shape.last_mut().expect("activations have a last dim") = columns;
            out = vec![0.0; x.rows() * columns];
            elementwise::each_row(&mut out, columns, threads, |row, out| {
                let (gate, up) = data[row * 2 * columns..][..2 * columns].split_at(columns);
                f.gated(out, gate, up);
            });
        } else {
            out = data.into_owned();
            elementwise::each_block(&mut out, threads, |_, x| f.forward(x));
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn activation_backward(&mut self, op: &Op, forward: &Op) -> Result<(), CpuError> {
        let threads = self.threads();
        let dy = self.tensor(op.inputs[0])?.f32();
        let x = self.tensor(forward.inputs[0])?;
        let shape = x.shape.clone();
        let mut out = x.f32().into_owned();
        if let Detail::Cap { bound } = forward.detail {
            let cap = bound as f32;
            elementwise::each_block(&mut out, threads, |first, x| {
                for (x, d) in x.iter_mut().zip(&dy[first..]) {
                    let t = tanh(*x / cap);
                    *x = d * (1.0 - t * t);
                }
            });
            self.put_tensor(op.outputs[0], shape, out);
            return Ok(());
        }
        if let Detail::BoundedGlu { limit } = forward.detail {
            let mut up = self.tensor(forward.inputs[1])?.f32().into_owned();
            nonlinear::bounded_glu_backward(&mut out, &mut up, &dy, limit as f32);
            self.put_tensor(op.outputs[0], shape.clone(), out);
            self.put_tensor(op.outputs[1], shape, up);
            return Ok(());
        }
        let f = Self::function(forward)?;
        if forward.inputs.len() == 2 {
            let mut up = self.tensor(forward.inputs[1])?.f32().into_owned();
            f.gated_backward(&mut out, &mut up, &dy);
            self.put_tensor(op.outputs[0], shape.clone(), out);
            self.put_tensor(op.outputs[1], shape, up);
            return Ok(());
        }
        if matches!(forward.kind, OpKind::Activation { gated: true }) {
            let columns = x.columns() / 2;
            elementwise::each_row(&mut out, 2 * columns, threads, |row, both| {
                let (gate, up) = both.split_at_mut(columns);
                f.gated_backward(gate, up, &dy[row * columns..]);
            });
        } else {
            elementwise::each_block(&mut out, threads, |first, x| f.backward(x, &dy[first..]));
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn bias(&mut self, op: &Op) -> Result<(), CpuError> {
        let x = self.tensor(op.inputs[0])?;
        let shape = x.shape.clone();
        let columns = x.columns();
        let mut out = x.f32().into_owned();
        if let Detail::Table { table, first } = op.detail {
            let info = self.info(op.inputs[0]);
            let positions = self.machine.positions(&info.global, &info.placements);
            let table = self.parameters.parameter(table).f32();
            elementwise::each_row(&mut out, columns, self.threads(), |row, y| {
                let at = (first + positions[row % positions.len()]) as usize * columns;
                for (y, t) in y.iter_mut().zip(&table[at..at + columns]) {
                    *y += t;
                }
            });
        } else {
            let b = self.tensor(op.inputs[1])?.f32();
            elementwise::each_row(&mut out, columns, self.threads(), |_, y| {
                for (y, b) in y.iter_mut().zip(b.iter()) {
                    *y += b;
                }
            });
        }
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn bias_backward(
        &mut self,
        op: &Op,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CpuError> {
        let dy = self.tensor(op.inputs[0])?;
        let columns = dy.columns();
        let dy = dy.f32();
        let like = forward.inputs[0];
        if let Detail::Table { table, first } = forward.detail {
            let info = self.info(like);
            let positions = self.machine.positions(&info.global, &info.placements);
            let rows: Vec<u32> = (0..info.global[0])
                .flat_map(|_| positions.iter().map(|&p| (first + p) as u32))
                .collect();
            return self.table_gradient(sink, table, &rows, &dy, (columns, 0), like);
        }
        let value = |row: usize, j: usize| dy[row * columns + j];
        self.token_sum(sink, forward.inputs[1], like, (columns, 1), value)
    }

    /// Adds the gradients of looked-up rows to a table's.
    pub(super) fn table_gradient(
        &self,
        sink: &mut dyn GradientSink,
        table: TensorId,
        ids: &[u32],
        dy: &[f32],
        (columns, first): (usize, u64),
        like: TensorId,
    ) -> Result<(), CpuError> {
        if self.machine.is_exact() {
            let info = self.info(table);
            let rows = self
                .machine
                .position
                .indices(&info.global, &info.placements, 0);
            let size = rows.len() * columns;
            let mut sum = TreeSum::default();
            for (leaf, rows) in self.machine.token_leaves(self.info(like), self.batch)? {
                let mut node = vec![0.0; size];
                tokens::scatter(ids, dy, columns, first, rows, &mut node);
                sum.leaf(leaf, node);
            }
            sink.tree(table, 0..size, sum);
        } else {
            let rows = 0..ids.len();
            tokens::scatter(ids, dy, columns, first, rows, sink.plain(table));
        }
        Ok(())
    }

    pub(super) fn dropout(&mut self, op: &Op) -> Result<(), CpuError> {
        let Detail::Dropout { probability } = op.detail else {
            return Err(Machine::unsupported(op, "no probability"));
        };
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

    pub(super) fn rope(
        &mut self,
        op: &Op,
        backward: bool,
        from: TensorId,
        to: TensorId,
    ) -> Result<(), CpuError> {
        let Detail::Rope {
            head_dim,
            first,
            neighbours,
            dims,
            theta,
            scaling,
        } = op.detail
        else {
            return Err(Machine::unsupported(op, "no frequencies"));
        };
        let info = self.info(op.inputs[0]);
        let positions = self.machine.positions(&info.global, &info.placements);
        let x = self.tensor(from)?;
        let (shape, columns) = (x.shape.clone(), x.columns());
        let mut out = x.f32().into_owned();
        let rotation = elementwise::Rotation {
            head_dim: head_dim as usize,
            first: first as usize,
            neighbours,
            frequencies: scaling.frequencies(theta, dims),
            magnitude: scaling.magnitude(),
            backward,
        };
        elementwise::rope(&mut out, columns, &rotation, &positions, self.threads());
        self.put_tensor(to, shape, out);
        Ok(())
    }
}

/// Kept elements over the probability of keeping them, zero elsewhere.
pub(super) fn dropped(x: &[f32], mask: &[u8], probability: f64, threads: usize) -> Vec<f32> {
    let keep = (1.0 / (1.0 - probability)) as f32;
    let mut out = x.to_vec();
    elementwise::each_block(&mut out, threads, |first, out| {
        for (y, &kept) in out.iter_mut().zip(&mask[first..]) {
            *y = if kept == 0 { 0.0 } else { *y * keep };
        }
    });
    out
}

/// A factor in the type of what it multiplies.
fn rounded(factor: f64, dtype: DType) -> f32 {
    Tensor::new(vec![1], vec![factor as f32], dtype).f32()[0]
}

/// Row-major strides of a shape.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1];
    }
    strides
}
