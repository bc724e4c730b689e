//! Backward of a pass: which kernel each traced operator runs.

use super::forward::untrained;
use super::state::Run;
use crate::block::GradientSink;
use crate::elementwise;
use crate::machine::{Machine, Result};
use crate::redistribute::put;
use crate::tensor::Tensor;
use crate::value::Value;
use dtensor::{
    Attention, AttentionPiece, Expert, Factor, Gradient, Op, Product, Token, View, ViewKind,
};
use std::sync::Arc;

impl Run<'_> {
    pub(super) fn backward_view(&mut self, view: &View) -> Result<()> {
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
                let before = self.held.values.remove(&self.block.storage(view.to));
                let mut data = match before.map(Arc::unwrap_or_clone) {
                    Some(Value::Tensor(x)) => x.into_f32(),
                    _ => vec![0.0; rows * columns],
                };
                let at = [(0..rows).collect(), (start..start + number).collect()];
                put(&mut data, &[rows, columns], &at, &part.f32());
                self.put_tensor(view.to, part.with_columns(whole), data);
            }
        }
        Ok(())
    }

    pub(super) fn backward_op(
        &mut self,
        op: &Op<Gradient>,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let block = self.block;
        let forward = |of: usize| &block.trace.forward[of];
        match op.operator {
            Gradient::Product(of, product, factor) => match (product, factor) {
                (Product::Matmul(..), Factor::First) => self.linear_backward_input(op),
                (Product::Matmul(..), Factor::Second) => {
                    self.linear_backward_weight(op, forward(of), sink)
                }
                (Product::GroupedMatmul(..), Factor::First) => {
                    let operands = (op.inputs[0], op.inputs[1], op.outputs[0]);
                    self.grouped_product(&op.scope, operands, true)
                }
                (Product::GroupedMatmul(..), Factor::Second) => {
                    self.grouped_backward_weight(op, forward(of), sink)
                }
            },
            Gradient::Attention(of, Attention { shape, piece, .. }, factor) => match piece {
                AttentionPiece::Softmax(rule) => {
                    self.softmax_backward(op, forward(of), (&shape, rule), sink)
                }
                AttentionPiece::Dropout(p) => self.dropout_backward(op, forward(of), p),
                AttentionPiece::Scores | AttentionPiece::Context => {
                    self.product_backward(op, forward(of), (&shape, piece), factor)
                }
            },
            Gradient::Norm(of, norm) => self.norm_backward(op, forward(of), &norm, sink),
            Gradient::Pointwise(of, pointwise) => {
                self.pointwise_backward(op, forward(of), pointwise, sink)
            }
            Gradient::Token(of, Token::Embedding(table)) => {
                self.embedding_backward(op, forward(of), table, sink)
            }
            Gradient::Token(of, Token::Positions { table, first }) => {
                self.positions_backward(op, forward(of), (table, first), sink)
            }
            // Forward wrote the gradient over the logits.
            Gradient::Token(of, Token::CrossEntropy(_)) => {
                self.copy(forward(of).inputs[0], op.outputs[0])
            }
            Gradient::Expert(of, Expert::Route(rule)) => {
                self.top_k_backward(op, forward(of), &rule)
            }
            Gradient::Expert(of, Expert::Permute | Expert::WeightedPermute) => {
                self.permute_backward(op, forward(of))
            }
            Gradient::Expert(of, Expert::Unpermute) => self.unpermute_backward(op, forward(of)),
            Gradient::Expert(_, Expert::PlainUnpermute) => self.plain_unpermute_backward(op),
            Gradient::Expert(of, Expert::Bias) => self.expert_bias_backward(op, forward(of), sink),
            Gradient::Recurrent(_, recurrent) => Err(untrained(recurrent.name(), &op.scope)),
            Gradient::Sum => self.gradient_sum(op),
            Gradient::Exchange(exchange) => self.exchange(op, exchange),
            // The gradients of keys and values were sent back when they were made.
            Gradient::Ring(_) => Ok(()),
        }
    }

    fn gradient_sum(&mut self, op: &Op<Gradient>) -> Result<()> {
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
            _ => {
                let reason = "a partial and a whole gradient";
                return Err(Machine::unsupported("addition", &op.scope, reason));
            }
        };
        self.set(op.outputs[0], value);
        Ok(())
    }
}
