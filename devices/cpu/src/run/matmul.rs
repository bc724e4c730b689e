//! Linear layers: products with weights, and their gradients.

use super::state::Run;
use crate::block::GradientSink;
use crate::gemm::{Matrix, multiply_add, multiply_tree};
use crate::machine::Result;
use crate::tensor::Tensor;
use crate::tree::TreeSum;
use crate::value::Value;
use dtensor::placement::BLOCK_AXES;
use dtensor::{Gradient, Op, TensorId};

impl Run<'_> {
    /// Whether some mesh axis shards this dim of a parameter: a product that sums over the dim then has partial sums on
    /// every rank.
    pub(super) fn is_split(&self, id: TensorId, dim: usize) -> bool {
        let info = self.info(id);
        BLOCK_AXES.iter().any(|&axis| {
            self.machine.position.mesh.size(axis) > 1 && info.placements.on(axis).shards(dim)
        })
    }

    /// `a · b` contracted over dim `dim` of the weight `w`.
    pub(super) fn product(
        &self,
        a: Matrix<'_>,
        b: Matrix<'_>,
        w: TensorId,
        dim: usize,
        (shape, out): (Vec<usize>, TensorId),
    ) -> Result<Value> {
        if self.machine.is_exact() {
            let leaves = self.machine.feature_leaves(self.info(w), dim)?;
            let sum = multiply_tree(a, b, &leaves);
            return Ok(self.settled(sum, (w, dim), (shape, out)));
        }
        let mut data = vec![0.0; a.rows * b.columns];
        multiply_add(a, b, &mut data, b.columns, self.threads());
        let dtype = self.info(out).dtype;
        Ok(Value::Tensor(Tensor::new(shape, data, dtype)))
    }

    /// A sum over a dim of a weight, reduced to a plain tensor at once when this rank holds all of the dim.
    pub(super) fn settled(
        &self,
        sum: TreeSum,
        (w, dim): (TensorId, usize),
        (shape, out): (Vec<usize>, TensorId),
    ) -> Value {
        Value::summed(sum, shape, self.info(out).dtype, !self.is_split(w, dim))
    }

    pub(super) fn linear(&mut self, op: &Op) -> Result<()> {
        let (x, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k) = (w.shape[0], w.shape[1]);
        let (data, weight) = (x.f32(), w.f32());
        let a = Matrix::new(&data, x.rows(), k, k);
        let b = Matrix::new(&weight, n, k, k).transposed();
        let value = self.product(a, b, op.inputs[1], 1, (x.with_columns(n), op.outputs[0]))?;
        self.set(op.outputs[0], value);
        Ok(())
    }

    pub(super) fn linear_backward_input(&mut self, op: &Op<Gradient>) -> Result<()> {
        let (dy, w) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k) = (w.shape[0], w.shape[1]);
        let (data, weight) = (dy.f32(), w.f32());
        let a = Matrix::new(&data, dy.rows(), n, n);
        let b = Matrix::new(&weight, n, k, k);
        let value = self.product(a, b, op.inputs[1], 0, (dy.with_columns(k), op.outputs[0]))?;
        self.set(op.outputs[0], value);
        Ok(())
    }

    pub(super) fn linear_backward_weight(
        &mut self,
        op: &Op<Gradient>,
        forward: &Op,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let (dy, x) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
        let (n, k, rows) = (dy.columns(), x.columns(), x.rows());
        let (dy, data) = (dy.f32(), x.f32());
        let a = Matrix::new(&dy, rows, n, n).transposed();
        let b = Matrix::new(&data, rows, k, k);
        let weight = forward.inputs[1];
        if self.machine.is_exact() {
            let leaves = self
                .machine
                .token_leaves(self.info(op.inputs[1]), self.batch)?;
            sink.tree(weight, 0..n * k, multiply_tree(a, b, &leaves));
        } else {
            multiply_add(a, b, sink.plain(weight), k, self.threads());
        }
        Ok(())
    }
}
