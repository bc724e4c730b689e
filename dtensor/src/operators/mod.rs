//! Operators, a file for each family: shapes and types, placement rules, what they keep, their backward, their names in
//! profiles and their classes of cost.

mod attention;
mod exchange;
mod expert;
mod matmul;
mod norm;
mod pointwise;
mod token;

use crate::error::DTensorError;
use crate::gradients::{Backward, Of};
use crate::operator::{Class, Collective, CostClass, Factor, Gradient, Operator};
use crate::tape::{DTensor, Record, Recorded, Tape};
use crate::tensor::ViewKind;
use crate::trace::{AnyOp, Pass, Trace};

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
    if let Recorded::Ring(op, collective) = record.what {
        // Keys and values go round again, with their gradients beside them.
        let bytes = 2 * collective.bytes;
        let ring = Gradient::Ring(Collective {
            bytes,
            ..collective
        });
        let reads = record.inputs.iter().map(|x| x.id).collect();
        backward.push(op, Pass::BackwardInput, ring, [reads, Vec::new()]);
    }
    let output = record.output.as_ref();
    let Some(gradient) = output.and_then(|output| backward.take(output)) else {
        return Ok(());
    };
    match record.what {
        Recorded::Ring(..) => {}
        Recorded::Slice(columns) => {
            backward.write_part(&record.inputs[0], &gradient, ViewKind::Columns(columns));
        }
        Recorded::Redistribute(of) => of.backward(backward, record, &gradient)?,
        Recorded::Operator(op) => {
            let of = Of { index: op, record };
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
    /// Its name in profiles, or that of the gradient of one of its factors, and its class of cost.
    pub(crate) fn class(&self, factor: Option<Factor>) -> Class {
        match *self {
            Self::Product(product) => product.class(),
            Self::Attention(attention) => attention.class(factor),
            Self::Norm(norm) => norm.class(),
            Self::Pointwise(pointwise) => pointwise.class(),
            Self::Token(token) => token.class(),
            Self::Expert(expert) => expert.class(),
            Self::Add => ("add".into(), CostClass::Add),
            Self::Exchange(exchange) => exchange.class(),
        }
    }

    /// Its class of cost.
    #[must_use]
    pub fn cost(&self) -> CostClass {
        self.class(None).1
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
