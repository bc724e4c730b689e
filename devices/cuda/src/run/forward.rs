//! Forward of a pass: which kernels each traced operator runs.

use super::state::{Run, rounded, unsupported};
use crate::error::CudaError;
use crate::launcher::{Place, threshold};
use crate::ops::{Dropout, Rope};
use dtensor::Nonlinearity;
use dtensor::trace::{Detail, Op, OpKind, TensorId, View, ViewKind};
use std::rc::Rc;

impl Run<'_> {
    pub(super) fn forward_view(&mut self, view: &View) -> Result<(), CudaError> {
        let ViewKind::Columns(cut) = view.kind else {
            return self.shard(view);
        };
        let x = self.tensor(view.from)?;
        let [columns, start, number] = cut.local(x.columns());
        let grid = x.reshaped(vec![x.len() / columns.max(1), columns]);
        let part = self.device().part(&grid, start, number)?;
        let mut shape = x.shape.clone();
        *shape.last_mut().expect("sliced tensors have a last dim") = part.len() / x.rows().max(1);
        self.set(view.to, part.reshaped(shape));
        Ok(())
    }

    pub(super) fn forward_op(&mut self, index: usize) -> Result<(), CudaError> {
        let block = self.block;
        let op = &block.trace.forward[index];
        if block.is_attention(index) {
            return match op.kind {
                OpKind::AttentionScores(shape) => self.attention(index, &shape),
                // Done at the scores.
                _ => Ok(()),
            };
        }
        let epilogues = &block.epilogues;
        if epilogues.is_bias(index) || self.gelus && epilogues.is_gelu(index) {
            // Done by the product before.
            return Ok(());
        }
        match op.kind {
            OpKind::Matmul { .. } => self.linear(index, op),
            OpKind::GroupedMatmul { .. } => {
                let route = self.routing(op)?;
                let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let out = route.at_experts(|at| self.device().grouped(at, x, w, false))?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            OpKind::Norm => self.norm(op),
            OpKind::Activation { .. } => self.activation(op),
            OpKind::Add => {
                let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let out = self.device().add(a, b)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            OpKind::Bias => self.bias(op),
            OpKind::Dropout => self.dropout(op),
            OpKind::Rope => self.rope(op, false, op.inputs[0], op.outputs[0]),
            OpKind::Copy => self.copied(op),
            OpKind::Embedding => self.embedding(op),
            OpKind::CrossEntropy => self.cross_entropy(op),
            OpKind::TopK => self.top_k(op),
            OpKind::Permute => {
                let route = self.routing(op)?;
                let out = self.device().permute(&route, self.tensor(op.inputs[0])?)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            OpKind::Unpermute => {
                let route = self.routing(op)?;
                let (rows, p) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let shape = self.tokens_shape(op.outputs[0], route.tokens, rows.columns());
                let out = self.device().combine(&route, rows, Some(p), shape)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            OpKind::AttentionScores(_) | OpKind::Softmax(_) | OpKind::AttentionContext(_) => {
                Err(unsupported(op, "attention in pieces"))
            }
            OpKind::Collective(collective) => self.collective(op, collective.kind),
            OpKind::Scale => self.scale(op),
        }
    }

    /// `[batch, tokens, columns]` of a tensor whose tokens are so many.
    pub(super) fn tokens_shape(&self, id: TensorId, tokens: usize, columns: usize) -> Vec<usize> {
        let batch = self.info(id).global[0] as usize;
        vec![batch, tokens / batch.max(1), columns]
    }

    /// A linear layer, with the bias and the GELU that follow it, if they do.
    fn linear(&mut self, index: usize, op: &Op) -> Result<(), CudaError> {
        let (block, ops) = (self.block, &self.block.trace.forward);
        let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let bias = match block.epilogues.bias(index) {
            Some(bias) => Some(self.tensor(ops[bias].inputs[1])?),
            None => None,
        };
        let to = block.made_by(index);
        if let Some(gelu) = block.epilogues.gelu(index).filter(|_| self.gelus) {
            let stays = block.stays(to, self.half);
            let (y, input) = self.device().linear_gelu(x, w, bias, stays)?;
            self.set(ops[gelu].outputs[0], y);
            if let Some(input) = input {
                self.set(to, input);
            }
            return Ok(());
        }
        let y = if block.trace.is_eight_bit(op) {
            self.linear8(op, bias)?
        } else {
            let dtype = self.info(op.outputs[0]).dtype;
            self.device().linear(x, w, bias, dtype)?
        };
        self.set(to, y);
        Ok(())
    }

    fn norm(&mut self, op: &Op) -> Result<(), CudaError> {
        let Detail::Norm {
            kind,
            epsilon,
            bias,
            from_one,
        } = op.detail
        else {
            return Err(unsupported(op, "a norm without its kind"));
        };
        let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let bias = match bias {
            Some(bias) => Some(self.tensor(bias)?),
            None => None,
        };
        // One head is a row of its own.
        let rows = x.reshaped(vec![x.len() / w.len(), w.len()]);
        let (out, statistics) = self
            .device()
            .norm((kind, epsilon, from_one), &rows, w, bias)?;
        let out = out.reshaped(x.shape.clone());
        self.set(op.outputs[0], out);
        self.set(op.outputs[1], statistics);
        Ok(())
    }

    pub(super) fn nonlinearity(op: &Op) -> Result<Nonlinearity, CudaError> {
        match op.detail {
            Detail::Activation { function, tanh } => Ok(Nonlinearity { function, tanh }),
            _ => Err(unsupported(op, "an unnamed function")),
        }
    }

    fn activation(&mut self, op: &Op) -> Result<(), CudaError> {
        let x = self.tensor(op.inputs[0])?;
        let up = match op.inputs.get(1) {
            Some(&up) => Some(self.tensor(up)?),
            None => None,
        };
        let gated = matches!(op.kind, OpKind::Activation { gated: true });
        let device = self.device();
        let out = match (op.detail, up) {
            (Detail::Cap { bound }, _) => device.cap(x, bound as f32)?,
            (Detail::BoundedGlu { limit }, Some(up)) => device.bounded_glu(x, up, limit as f32)?,
            _ if gated => device.gated(Self::nonlinearity(op)?, x, up)?,
            _ => device.activation(Self::nonlinearity(op)?, x)?,
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    /// Multiplies by a number, or every row by the sigmoid of its own.
    fn scale(&mut self, op: &Op) -> Result<(), CudaError> {
        let x = self.tensor(op.inputs[0])?;
        let out = match op.detail {
            Detail::Scale { factor } => self.device().scale(x, rounded(factor, x.dtype))?,
            Detail::Gate => self.device().gate_rows(x, self.tensor(op.inputs[1])?)?,
            _ => return Err(unsupported(op, "no factor")),
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    fn bias(&mut self, op: &Op) -> Result<(), CudaError> {
        let x = self.tensor(op.inputs[0])?;
        let out = match op.detail {
            Detail::Table { table, first } => {
                let (positions, count) = self.machine.positions(self.info(op.inputs[0]), 1)?;
                let (table, first) = (self.parameters.parameter(table), first as usize);
                let columns = table.columns();
                let table = table.part(first * columns, vec![table.rows() - first, columns]);
                self.device().bias(x, &table, Some((&*positions, count)))?
            }
            Detail::ExpertBias => {
                let (route, b) = (self.routing(op)?, self.tensor(op.inputs[1])?);
                route.at_experts(|at| self.device().expert_bias(at, x, b))?
            }
            _ => self.device().bias(x, self.tensor(op.inputs[1])?, None)?,
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    fn dropout(&mut self, op: &Op) -> Result<(), CudaError> {
        let Detail::Dropout { probability } = op.detail else {
            return Err(unsupported(op, "no probability"));
        };
        let x = self.tensor(op.inputs[0])?;
        let info = self.info(op.inputs[0]);
        let columns = self
            .machine
            .span(info, info.global.len() - 1)
            .filter(|_| info.global.len() == 3);
        let Some([first, number]) = columns else {
            return Err(unsupported(op, "columns that are not next to each other"));
        };
        let (positions, count) = self.machine.positions(info, 1)?;
        let call = Dropout {
            place: Place {
                stream: self.stream(op),
                threshold: threshold(probability),
                scale: (1.0 / (1.0 - probability)) as f32,
                first_sequence: self.batch.host.first_sequence as i64,
                sequence: [count as i64, info.global[1] as i64],
                columns: [number as i64, first as i64, info.global[2] as i64],
            },
            positions: &positions,
        };
        let (out, mask) = self.device().dropout(x, &call)?;
        self.set(op.outputs[0], out);
        self.set(op.outputs[1], mask);
        Ok(())
    }

    pub(super) fn rope(
        &mut self,
        op: &Op,
        backward: bool,
        from: TensorId,
        to: TensorId,
    ) -> Result<(), CudaError> {
        let Detail::Rope {
            head_dim,
            dims,
            first,
            neighbours,
            ..
        } = op.detail
        else {
            return Err(unsupported(op, "no frequencies"));
        };
        let (turns, sequence) = self.machine.turns(self.info(op.inputs[0]), &op.detail)?;
        let call = Rope {
            turns: &turns,
            sequence,
            dims: [head_dim, first, dims].map(|n| n as usize),
            neighbours,
            backward,
        };
        let out = self.device().rope(self.tensor(from)?, &call)?;
        self.set(to, out);
        Ok(())
    }

    /// Every head's own columns with those that all share, or a copy to another type; none where the type is
    /// the same or the loss takes any.
    fn copied(&mut self, op: &Op) -> Result<(), CudaError> {
        let (x, to) = (self.tensor(op.inputs[0])?, op.outputs[0]);
        if let Detail::Join { own, .. } = op.detail {
            let out = self
                .device()
                .join(x, self.tensor(op.inputs[1])?, own as usize)?;
            self.set(to, out);
            return Ok(());
        }
        let dtype = self.info(to).dtype;
        let out = if x.dtype == dtype || self.block.is_only_for_the_loss(to) {
            x.clone()
        } else {
            self.device().cast(x, dtype)?
        };
        self.set(to, out);
        Ok(())
    }

    fn embedding(&mut self, op: &Op) -> Result<(), CudaError> {
        let Detail::Table { table: id, .. } = op.detail else {
            return Err(unsupported(op, "no table"));
        };
        let table = self.parameters.parameter(id);
        let first = self.first_index(id, 0);
        let tokens = self.batch.host.ids.len();
        let shape = self.tokens_shape(op.outputs[0], tokens, table.columns());
        let out = self
            .device()
            .embedding(&self.batch.words.ids, table, first, shape)?;
        let dtype = self.info(op.outputs[0]).dtype;
        let out = if out.dtype == dtype {
            out
        } else {
            self.device().cast(&out, dtype)?
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    fn cross_entropy(&mut self, op: &Op) -> Result<(), CudaError> {
        let sums = match op.detail {
            Detail::Loss { sums: Some(sums) } => Some(self.tensor(sums)?),
            _ => None,
        };
        let logits = op.inputs[0];
        // The logits' place now holds their gradient: backward needs nothing else of them.
        let out = self
            .device()
            .loss(self.tensor(logits)?, &self.losses(logits), sums)?;
        self.set(op.outputs[0], out);
        Ok(())
    }

    fn top_k(&mut self, op: &Op) -> Result<(), CudaError> {
        let Detail::Route { router, bias } = op.detail else {
            return Err(unsupported(op, "no rule of choice"));
        };
        let logits = self.tensor(op.inputs[0])?;
        let top_k = *self
            .info(op.outputs[0])
            .shape
            .last()
            .expect("choices have a last dim") as usize;
        let bias = bias.map(|bias| self.parameters.parameter(bias));
        let (route, weights) = self.device().route(logits, top_k, (&router, bias))?;
        self.set(op.outputs[0], weights);
        self.held.route = Some(Rc::new(route));
        Ok(())
    }
}
