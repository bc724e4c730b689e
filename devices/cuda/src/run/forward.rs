//! Forward of a pass: which kernels each traced operator runs.

use super::state::{FUSED_BOUNDED, Run, UNTRAINED, no_kernel, rounded};
use crate::error::{CudaError, Result};
use crate::launcher::{Place, TurningArgument, threshold};
use crate::tensor::Tensor;
use dtensor::{
    self, AttentionPiece, Expert, GatedUnit, Norm, Op, Operator, Pointwise, Product, Rotary,
    TensorId, Token, View, ViewKind,
};
use std::rc::Rc;

impl Run<'_> {
    pub(super) fn forward_view(&mut self, view: &View) -> Result<()> {
        let ViewKind::Columns(cut) = view.kind else {
            return self.shard(view);
        };
        let x = self.tensor(view.from)?;
        let [columns, start, number] = cut.local(x.columns());
        let grid = x.reshaped(vec![x.len() / columns.max(1), columns]);
        let part = self.device().copy_columns(&grid, start, number)?;
        let shape = x.with_columns(part.len() / x.rows().max(1));
        self.set(view.to, part.reshaped(shape));
        Ok(())
    }

    pub(super) fn forward_op(&mut self, index: usize) -> Result<()> {
        let block = self.block;
        let op = &block.trace.forward[index];
        let epilogues = &block.epilogues;
        if epilogues.is_bias(index) || self.gelus && epilogues.is_gelu(index) {
            // Fused into the preceding GEMM.
            return Ok(());
        }
        match op.operator {
            Operator::Product(product @ Product::Matmul(..)) => self.linear(index, op, product),
            Operator::Product(Product::GroupedMatmul(..)) => {
                let route = self.routing(&op.scope)?;
                let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let out = route.at_experts(|at| self.device().grouped(at, x, w, false))?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            Operator::Attention(attention) => match attention.piece {
                AttentionPiece::Scores => self.attention(&attention),
                // Done by the fused attention at the scores.
                AttentionPiece::Softmax(_)
                | AttentionPiece::Dropout(_)
                | AttentionPiece::Context => Ok(()),
            },
            Operator::Norm(norm) => self.norm(op, &norm),
            Operator::Pointwise(pointwise) => self.pointwise(op, pointwise),
            Operator::Token(token) => self.token(op, token),
            Operator::Expert(expert) => self.expert(op, expert),
            Operator::Recurrent(recurrent) => Err(CudaError::unsupported(
                recurrent.name(),
                &op.scope,
                UNTRAINED,
            )),
            Operator::Add => {
                let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let out = self.device().add(a, b)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            Operator::Exchange(exchange) => self.exchange(op, exchange),
        }
    }

    fn pointwise(&mut self, op: &Op, pointwise: Pointwise) -> Result<()> {
        let x = self.tensor(op.inputs[0])?;
        let second = || self.tensor(op.inputs[1]);
        let device = self.device();
        let out = match pointwise {
            Pointwise::Activation(function) => device.activation(function, x)?,
            Pointwise::Gated(GatedUnit::Plain(function)) => {
                device.gated(function, x, Some(second()?))?
            }
            Pointwise::FusedGated(GatedUnit::Plain(function)) => device.gated(function, x, None)?,
            Pointwise::Gated(GatedUnit::Bounded(limit)) => {
                device.bounded_glu(x, second()?, limit as f32)?
            }
            Pointwise::FusedGated(GatedUnit::Bounded(_)) => {
                return Err(no_kernel(FUSED_BOUNDED, &op.scope));
            }
            Pointwise::Cap(bound) => device.cap(x, bound as f32)?,
            Pointwise::Rope(rotary) => self.turned(x, op.inputs[0], &rotary, false)?,
            Pointwise::Scale(factor) => device.scale(x, rounded(factor, x.dtype))?,
            Pointwise::Temperature(_) => return Err(no_kernel("temperature", &op.scope)),
            Pointwise::UnitNorm { .. } => return Err(no_kernel("unit norm", &op.scope)),
            Pointwise::Gate => device.gate_rows(x, second()?)?,
            Pointwise::SigmoidGate => {
                return Err(CudaError::unsupported("sigmoid gate", &op.scope, UNTRAINED));
            }
            Pointwise::Bias => device.bias(x, second()?, None)?,
            Pointwise::Dropout(probability) => return self.dropout(op, probability),
            Pointwise::Copy => {
                let (to, any) = (
                    op.outputs[0],
                    self.block.is_only_for_the_loss(op.outputs[0]),
                );
                self.copied(x, to, any)?
            }
            Pointwise::Join { own, .. } => device.join(x, second()?, own as usize)?,
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    fn token(&mut self, op: &Op, token: Token) -> Result<()> {
        let out = match token {
            Token::Embedding(table) => self.embedding(op, table)?,
            Token::Positions { table, first } => {
                let x = self.tensor(op.inputs[0])?;
                let (positions, count) = self.machine.positions(self.info(op.inputs[0]), 1)?;
                let (table, first) = (self.parameters.parameter(table), first as usize);
                let columns = table.columns();
                let table = table.part(first * columns, vec![table.rows() - first, columns]);
                self.device().bias(x, &table, Some((&*positions, count)))?
            }
            Token::CrossEntropy(sums) => {
                let sums = sums.map(|sums| self.tensor(sums)).transpose()?;
                let logits = op.inputs[0];
                // The logits are overwritten by their gradient, which is all that backward needs of them.
                self.device()
                    .loss(self.tensor(logits)?, &self.losses(logits), sums)?
            }
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    fn expert(&mut self, op: &Op, expert: Expert) -> Result<()> {
        let out = match expert {
            Expert::Route(rule) => self.top_k(op, &rule)?,
            Expert::Permute => {
                let route = self.routing(&op.scope)?;
                self.device().permute(&route, self.tensor(op.inputs[0])?)?
            }
            Expert::WeightedPermute | Expert::PlainUnpermute => {
                return Err(no_kernel("routing that weighs inputs", &op.scope));
            }
            Expert::Unpermute => {
                let route = self.routing(&op.scope)?;
                let (rows, p) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let shape = self.tokens_shape(op.outputs[0], route.tokens, rows.columns());
                self.device().combine(&route, rows, Some(p), shape)?
            }
            Expert::Bias => {
                let route = self.routing(&op.scope)?;
                let (x, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                route.at_experts(|at| self.device().expert_bias(at, x, b))?
            }
        };
        self.set(op.outputs[0], out);
        Ok(())
    }

    /// `[batch, tokens, columns]` of a traced tensor, with this many tokens.
    pub(super) fn tokens_shape(&self, id: TensorId, tokens: usize, columns: usize) -> Vec<usize> {
        let batch = self.info(id).global[0] as usize;
        vec![batch, tokens / batch.max(1), columns]
    }

    /// A linear layer, with the bias and the GELU that follow it, if any.
    fn linear(&mut self, index: usize, op: &Op, product: Product) -> Result<()> {
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
        let y = if block.trace.is_eight_bit(product) {
            self.linear8(op, bias)?
        } else {
            let dtype = self.info(op.outputs[0]).dtype;
            self.device().linear(x, w, bias, dtype)?
        };
        self.set(to, y);
        Ok(())
    }

    fn norm(&mut self, op: &Op, norm: &Norm) -> Result<()> {
        let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let bias = norm.bias.map(|bias| self.tensor(bias)).transpose()?;
        // A row is what the weight covers: the last dim, or one head of it.
        let rows = x.reshaped(vec![x.len() / w.len(), w.len()]);
        let (out, statistics) =
            self.device()
                .norm((norm.kind, norm.epsilon, norm.from_one), &rows, w, bias)?;
        let out = out.reshaped(x.shape.clone());
        self.set(op.outputs[0], out);
        self.set(op.outputs[1], statistics);
        Ok(())
    }

    fn dropout(&mut self, op: &Op, probability: f64) -> Result<()> {
        let x = self.tensor(op.inputs[0])?;
        let info = self.info(op.inputs[0]);
        let columns = self
            .machine
            .span(info, info.global.len() - 1)
            .filter(|_| info.global.len() == 3);
        let Some([first, number]) = columns else {
            let reason = "columns that are not next to each other";
            return Err(CudaError::unsupported("dropout", &op.scope, reason));
        };
        let (positions, count) = self.machine.positions(info, 1)?;
        let place = Place {
            stream: self.stream(op),
            threshold: threshold(probability),
            scale: (1.0 / (1.0 - probability)) as f32,
            first_sequence: self.batch.host.first_sequence as i64,
            sequence: [count as i64, info.global[1] as i64],
            columns: [number as i64, first as i64, info.global[2] as i64],
        };
        let (out, mask) = self.device().dropout(x, place, &positions)?;
        self.set(op.outputs[0], out);
        self.set(op.outputs[1], mask);
        Ok(())
    }

    /// `x`, whose tokens are those of `like`, with rotary embedding applied, or undone in backward.
    pub(super) fn turned(
        &self,
        x: &Tensor,
        like: TensorId,
        rotary: &Rotary,
        backward: bool,
    ) -> Result<Tensor> {
        let (turns, sequence) = self.machine.turns(self.info(like), rotary)?;
        let turning = TurningArgument {
            sequence: sequence as i64,
            heads: (x.columns() as u64 / rotary.head_dim) as i64,
            dims: [rotary.head_dim, rotary.first, rotary.dims].map(|n| n as i64),
            neighbours: i32::from(rotary.neighbours),
            direction: if backward { -1.0 } else { 1.0 },
        };
        self.device().rope(x, &turns, turning)
    }

    /// A copy in the type of `to`; no copy where the type is the same, or `any` type will do.
    pub(super) fn copied(&self, x: &Tensor, to: TensorId, any: bool) -> Result<Tensor> {
        let dtype = self.info(to).dtype;
        if any || x.dtype == dtype {
            return Ok(x.clone());
        }
        self.device().cast(x, dtype)
    }

    fn embedding(&self, op: &Op, id: TensorId) -> Result<Tensor> {
        let table = self.parameters.parameter(id);
        let first = self.first_index(id, 0);
        let (tokens, to) = (self.batch.host.ids.len(), op.outputs[0]);
        let shape = self.tokens_shape(to, tokens, table.columns());
        let out = self
            .device()
            .embedding(&self.batch.words.ids, table, first, shape)?;
        self.copied(&out, to, false)
    }

    fn top_k(&mut self, op: &Op, rule: &dtensor::Route) -> Result<Tensor> {
        let logits = self.tensor(op.inputs[0])?;
        let top_k = *self
            .info(op.outputs[0])
            .shape
            .last()
            .expect("choices have a last dim") as usize;
        if rule.bias.is_some() && !rule.router.sigmoid {
            return Err(no_kernel("softmax routing with a bias", &op.scope));
        }
        let bias = rule.bias.map(|bias| self.parameters.parameter(bias));
        let (route, weights) = self.device().route(logits, top_k, (&rule.router, bias))?;
        self.held.route = Some(Rc::new(route));
        Ok(weights)
    }
}
