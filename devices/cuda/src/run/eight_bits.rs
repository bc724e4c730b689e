//! Linear layers in FP8: weights and activations in E4M3, gradients in E5M2, results in bf16, gradients of weights in
//! 32 bits.

use super::machine::GradientSink;
use super::state::Run;
use crate::error::Result;
use crate::launcher::Float8;
use crate::ops::{Lies, Matrix8};
use crate::tensor::Tensor;
use dtensor::{Gradient, Op, TensorId};

impl Run<'_> {
    /// Casts an activation or a gradient to FP8, or returns the last cast if it is the same.
    fn cast(&self, id: TensorId, format: Float8, ways: Lies) -> Result<Matrix8> {
        let last = match format {
            Float8::E4m3 => &self.casts.activation,
            Float8::E5m2 => &self.casts.gradient,
        };
        let found = last
            .take()
            .filter(|(of, cast)| *of == id && cast.lies(ways));
        let cast = match found {
            Some((_, cast)) => cast,
            None => self.device().cast8(self.tensor(id)?, format, ways)?,
        };
        *last.borrow_mut() = Some((id, cast.clone()));
        Ok(cast)
    }

    fn weight(&self, id: TensorId, ways: Lies) -> Result<Matrix8> {
        self.device().cast8(self.tensor(id)?, Float8::E4m3, ways)
    }

    /// `x · wᵀ`, plus a bias.
    pub(super) fn linear8(&self, op: &Op, bias: Option<&Tensor>) -> Result<Tensor> {
        let [x, w] = [op.inputs[0], op.inputs[1]];
        let shape = self.tensor(x)?.with_columns(self.tensor(w)?.rows());
        let x = self.cast(x, Float8::E4m3, Lies::Rows)?;
        let w = self.weight(w, Lies::Rows)?;
        self.device().linear8(&x, &w, bias, shape)
    }

    /// The gradient of a linear layer's input.
    pub(super) fn linear_backward8(&self, op: &Op<Gradient>) -> Result<Tensor> {
        let [dy, w] = [op.inputs[0], op.inputs[1]];
        let shape = self.tensor(dy)?.with_columns(self.tensor(w)?.columns());
        // If the weight's gradient is computed in the same pass, it contracts the other dim: both layouts are cast at
        // once.
        let ways = if self.half == Some(dtensor::block::Half::Both) {
            Lies::Both
        } else {
            Lies::Rows
        };
        let dy = self.cast(dy, Float8::E5m2, ways)?;
        let w = self.weight(w, Lies::Columns)?;
        self.device().linear_backward8(&dy, &w, shape)
    }

    /// Adds the gradient of a linear layer's weight to `sink`.
    pub(super) fn weight_gradient8(
        &self,
        op: &Op<Gradient>,
        weight: TensorId,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let dy = self.cast(op.inputs[0], Float8::E5m2, Lies::Columns)?;
        let x = self.cast(op.inputs[1], Float8::E4m3, Lies::Columns)?;
        self.device()
            .add_linear_gradient8(&sink.gradient(weight), &dy, &x)
    }
}
