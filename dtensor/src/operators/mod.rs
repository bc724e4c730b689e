//! Operators, one file per family: shapes and types, placement rules, saved tensors, backward, names in profiles and
//! cost classes.

mod attention;
mod exchange;
mod expert;
mod matmul;
mod norm;
mod pointwise;
mod recurrent;
mod token;

use crate::error::DTensorError;
use crate::gradients::{Backward, Of};
use crate::operator::{Class, Collective, CostClass, Factor, Gradient, Operator, Product, Site};
use crate::tape::{DTensor, Record, Recorded, Tape};
use crate::tensor::ViewKind;
use crate::trace::{AnyOp, Pass, Trace};

pub use matmul::EIGHT_BIT_MULTIPLE;
pub use recurrent::ScanWork;

impl Tape<'_> {
    /// Ends the block at `output` and derives its backward pass: goes through the records in reverse.
    ///
    /// # Errors
    /// When a gradient cannot be redistributed as the transpose of forward requires.
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

/// Derives the gradients of a record's inputs from the gradient of its output.
fn undo(backward: &mut Backward<'_, '_>, record: &Record) -> Result<(), DTensorError> {
    if let Recorded::Ring(op, collective) = record.what {
        // Keys and values go around the ring again, with their gradients.
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
                Operator::Recurrent(recurrent) => recurrent.backward(backward, of, &gradient),
                Operator::Add => {
                    for input in &record.inputs {
                        backward.accumulate(input, gradient.clone());
                    }
                }
                // These are recorded as redistributions; the gradient of the loss covers its vocabulary sums.
                Operator::Exchange(_) => {}
            }
        }
    }
    Ok(())
}

impl Operator {
    /// Name in profiles and cost class; with a factor, those of that factor's gradient.
    pub(crate) fn class(&self, factor: Option<Factor>) -> Class {
        match *self {
            Self::Product(product) => product.class(),
            Self::Attention(attention) => attention.class(factor),
            Self::Norm(norm) => norm.class(),
            Self::Pointwise(pointwise) => pointwise.class(),
            Self::Token(token) => token.class(),
            Self::Expert(expert) => expert.class(),
            Self::Recurrent(recurrent) => recurrent.class(),
            Self::Add => ("add".into(), CostClass::Add),
            Self::Exchange(exchange) => exchange.class(),
        }
    }

    /// The operator's cost class.
    #[must_use]
    pub fn cost(&self) -> CostClass {
        self.class(None).1
    }
}

impl AnyOp<'_> {
    /// The operator's cost class.
    #[must_use]
    pub fn cost(&self) -> CostClass {
        self.operator.cost()
    }

    /// Whether it is a product of an adapter, forward or backward.
    #[must_use]
    pub fn is_of_adapter(&self) -> bool {
        matches!(
            self.operator,
            Operator::Product(Product::Matmul(_, Site::Adapter))
        )
    }

    /// Whether it belongs to core attention, forward or backward.
    #[must_use]
    pub fn is_core_attention(&self) -> bool {
        matches!(self.operator, Operator::Attention(_))
    }
}
