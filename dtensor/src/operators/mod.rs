//! Operators, a file for each family: shapes and types, placement rules, what they keep, their backward, their names in
//! profiles and their classes of cost.

mod attention;
mod exchange;
mod expert;
mod matmul;
mod norm;
mod pointwise;
mod token;

use self::exchange::ring_backward;
use crate::error::DTensorError;
use crate::gradients::Backward;
use crate::operator::{CostClass, Exchange, Factor, Gradient, Operator};
use crate::tape::{DTensor, Record, Recorded, Tape};
use crate::tensor::ViewKind;
use crate::trace::{AnyOp, Trace};

pub use matmul::EIGHT_BIT_MULTIPLE;

impl Tape<'_> {
    /// Ends the block at `output` and derives its backward pass: the records in reverse, each by its operator.
    ///
    /// # Errors
    /// When a gradient cannot be redistributed as the forward's transpose asks.
    pub fn finish(mut self, output: &DTensor) -> Result<Trace, DTensorError> {
        self.trace.output = Some(output.id);
        let records = std::mem::take(&mut self.records);
        let mut backward = Backward::begin(&mut self, output);
        for record in records.iter().rev() {
            undo(&mut backward, record)?;
        }
        backward.end();
        Ok(self.trace)
    }
}

/// What a record's output gradient makes of the gradients of its inputs.
fn undo(backward: &mut Backward<'_, '_>, record: &Record) -> Result<(), DTensorError> {
    if let Recorded::Ring(op) = record.what {
        ring_backward(backward, op, record);
    }
    let output = record.output.as_ref();
    let Some(gradient) = output.and_then(|output| backward.take(output)) else {
        return Ok(());
    };
    match record.what {
        Recorded::Ring(_) => {}
        Recorded::Slice(columns) => {
            backward.write_part(&record.inputs[0], &gradient, ViewKind::Columns(columns));
        }
        Recorded::Redistribute(of) => of.backward(backward, record, &gradient)?,
        Recorded::Operator(op) => {
            let of = (op, record);
            match backward.tape.trace.forward[op].operator {
                Operator::Product(product) => product.backward(backward, of, &gradient),
                Operator::Attention(attention) => attention.backward(backward, of, &gradient),
                Operator::Norm(norm) => {
                    let operator = Gradient::Norm(op, norm);
                    backward.push_one(of, &gradient, operator, |_, placed| placed);
                }
                Operator::Pointwise(pointwise) => pointwise.backward(backward, of, gradient),
                Operator::Token(token) => token.backward(backward, of, gradient),
                Operator::Expert(expert) => expert.backward(backward, of, gradient),
                Operator::Add => {
                    for input in &record.inputs {
                        backward.accumulate(input, gradient.clone());
                    }
                }
                // Recorded as redistributions; the loss's gradient has that of its sums.
                Operator::Exchange(_) => {}
            }
        }
    }
    Ok(())
}

impl Operator {
    /// Its name in profiles, or that of the gradient of one of its factors.
    pub(crate) fn key(&self, factor: Option<Factor>) -> String {
        let name = match *self {
            Self::Product(product) => product.key(),
            Self::Attention(attention) => return attention.key(factor),
            Self::Norm(norm) => norm.key(),
            Self::Pointwise(pointwise) => return pointwise.key(),
            Self::Token(token) => token.key(),
            Self::Expert(expert) => expert.key(),
            Self::Add => "add",
            Self::Exchange(Exchange { moves, .. }) => return moves.key(),
        };
        name.to_owned()
    }

    /// The sizes that decide its time, where these are not the rows and columns of its largest tensor.
    pub(crate) fn sizes(&self) -> Option<Vec<u64>> {
        match *self {
            Self::Product(product) => Some(product.sizes()),
            Self::Attention(attention) => attention.sizes(),
            _ => None,
        }
    }

    /// Its class of cost.
    #[must_use]
    pub fn cost(&self) -> CostClass {
        match *self {
            Self::Product(product) => CostClass::Product(product),
            Self::Attention(attention) => attention.cost(),
            Self::Norm(_) => CostClass::Norm,
            Self::Pointwise(pointwise) => pointwise.cost(),
            Self::Token(token) => token.cost(),
            Self::Expert(expert) => expert.cost(),
            Self::Add => CostClass::Add,
            Self::Exchange(Exchange { collective, .. }) => CostClass::Collective(collective),
        }
    }
}

impl AnyOp<'_> {
    /// Its class of cost.
    #[must_use]
    pub fn cost(&self) -> CostClass {
        self.operator.cost()
    }

    /// Whether it is a piece of core attention, or of its backward.
    #[must_use]
    pub fn is_core_attention(&self) -> bool {
        matches!(self.operator, Operator::Attention(_))
    }
}
