//! Forward of a pass: which kernel each traced operator runs.

use catalog::Axis;
use dtensor::{
    Attention, AttentionPiece, Exchange, Expert, Moves, Op, Operator, Product, Token, View,
    ViewKind,
};

use super::state::Run;
use crate::elementwise;
use crate::machine::{CpuError, Machine, Result};
use crate::redistribute::take;
use crate::tensor::Tensor;
use crate::value::Value;

/// The error for an operator of recurrent layers.
pub(super) fn untrained(operator: &str, scope: &str) -> CpuError {
    let reason = "recurrent layers: they are planned and predicted, not trained";
    Machine::unsupported(operator, scope, reason)
}

impl Run<'_> {
    pub(super) fn forward_view(&mut self, view: &View) -> Result<()> {
        let x = self.tensor(view.from)?;
        let part = match view.kind {
            ViewKind::Shard => self
                .machine
                .shard(x, self.info(view.from), self.info(view.to)),
            ViewKind::Columns(part) => {
                let [columns, start, number] = part.local(x.columns());
                let rows: Vec<usize> = (0..x.len() / columns.max(1)).collect();
                let picked = (start..start + number).collect();
                let flat = [rows.len(), columns];
                let shape = x.with_columns(rows.len() * number / x.rows().max(1));
                let data = take(&x.f32(), &flat, &[rows, picked]);
                Tensor::new(shape, data, x.dtype())
            }
        };
        self.set(view.to, Value::Tensor(part));
        Ok(())
    }

    pub(super) fn forward_op(&mut self, op: &Op) -> Result<()> {
        match op.operator {
            Operator::Product(Product::Matmul(..)) => self.linear(op),
            Operator::Product(Product::GroupedMatmul(..)) => self.grouped_linear(op),
            Operator::Attention(Attention { shape, piece, .. }) => match piece {
                AttentionPiece::Scores => self.attention_scores(op, &shape),
                AttentionPiece::Softmax(rule) => self.softmax(op, &shape, rule),
                AttentionPiece::Dropout(probability) => self.dropout(op, probability),
                AttentionPiece::Context => self.attention_context(op, &shape),
            },
            Operator::Norm(norm) => self.norm(op, &norm),
            Operator::Pointwise(pointwise) => self.pointwise(op, pointwise),
            Operator::Token(Token::Embedding(table)) => self.embedding(op, table),
            Operator::Token(Token::Positions { table, first }) => self.positions(op, table, first),
            Operator::Token(Token::CrossEntropy(sums)) => self.cross_entropy(op, sums),
            Operator::Expert(Expert::Route(rule)) => self.top_k(op, &rule),
            Operator::Expert(Expert::Permute | Expert::WeightedPermute) => self.permute(op),
            Operator::Expert(Expert::Unpermute | Expert::PlainUnpermute) => self.unpermute(op),
            Operator::Expert(Expert::Bias) => self.expert_bias(op),
            Operator::Recurrent(recurrent) => Err(untrained(recurrent.name(), &op.scope)),
            Operator::Add => self.add(op),
            Operator::Exchange(exchange) => self.exchange(op, exchange),
        }
    }

    fn add(&mut self, op: &Op) -> Result<()> {
        let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let mut out = a.f32().into_owned();
        let b = b.f32();
        elementwise::add(&mut out, &b, self.threads());
        let shape = a.shape.clone();
        self.put_tensor(op.outputs[0], shape, out);
        Ok(())
    }

    pub(super) fn exchange<O>(&mut self, op: &Op<O>, exchange: Exchange) -> Result<()> {
        match exchange.moves {
            Moves::Redistribute { from, to } => {
                let (x, out) = (op.inputs[0], op.outputs[0]);
                let axis = exchange.collective.axis;
                let mut info = self.info(x).clone();
                info.placements = info.placements.with(axis, from);
                let (value, moves) = (self.value(x)?, (axis, from, to));
                let value = self.machine.redistribute(&op.scope, value, &info, moves)?;
                self.set(out, value);
                Ok(())
            }
            Moves::Dispatch => self.dispatch(op, Axis::Ep, false),
            Moves::Combine => self.dispatch(op, Axis::Ep, true),
            Moves::ExpertGather => self.dispatch(op, Axis::Etp, false),
            Moves::ExpertReduce => self.dispatch(op, Axis::Etp, true),
            Moves::VocabularySums(logits) => self.vocabulary_sums(op, logits),
            Moves::Ring => op
                .inputs
                .iter()
                .try_for_each(|&id| self.gather_ring(&op.scope, id)),
        }
    }
}
