//! Scaling, soft caps and gates, and columns that all heads share.

use super::grid::{EACH, threads_of};
use crate::error::CudaError;
use crate::kernels::{Kernel, typed};
use crate::launcher::Arguments;
use crate::tensor::{Device, Tensor};

/// Most threads per row.
const MOST: u32 = 256;

impl Device {
    /// Launches an elementwise kernel over tensors of equal length; `number` precedes the length in its arguments.
    fn pass(&self, kernel: Kernel, tensors: &[&Tensor], number: f32) -> Result<(), CudaError> {
        let n = tensors[0].len();
        let arguments = tensors
            .iter()
            .fold(Arguments::default(), |all, t| all.with(t.address()))
            .with(number)
            .with(n as i64);
        self.flat(kernel, n.div_ceil(EACH), arguments)
    }

    /// `x · factor`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn scale(&self, x: &Tensor, factor: f32) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        self.pass(typed!(Scale, "scale", x.is_bf16()), &[&out, x], factor)?;
        Ok(out)
    }

    /// Soft cap: `bound · tanh(x / bound)`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn cap(&self, x: &Tensor, bound: f32) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        self.pass(typed!(Scale, "cap", x.is_bf16()), &[&out, x], bound)?;
        Ok(out)
    }

    /// The gradient of a soft cap's input.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn cap_backward(&self, dy: &Tensor, x: &Tensor, bound: f32) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let kernel = typed!(Scale, "cap_backward", x.is_bf16());
        self.pass(kernel, &[&out, dy, x], bound)?;
        Ok(out)
    }

    /// gpt-oss's gate: `g·σ(1.702·g)·(u + 1)` with `g` at most `limit` and `u` within `±limit`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn bounded_glu(&self, gate: &Tensor, up: &Tensor, limit: f32) -> Result<Tensor, CudaError> {
        let out = self.tensor(gate.shape.clone(), gate.dtype)?;
        let kernel = typed!(Scale, "bounded_glu", gate.is_bf16());
        self.pass(kernel, &[&out, gate, up], limit)?;
        Ok(out)
    }

    /// Gradients of the gate and up projections of [`Device::bounded_glu`].
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn bounded_glu_backward(
        &self,
        dy: &Tensor,
        gate: &Tensor,
        up: &Tensor,
        limit: f32,
    ) -> Result<[Tensor; 2], CudaError> {
        let d_gate = self.tensor(gate.shape.clone(), gate.dtype)?;
        let d_up = self.tensor(up.shape.clone(), up.dtype)?;
        let kernel = typed!(Scale, "bounded_glu_backward", gate.is_bf16());
        self.pass(kernel, &[&d_gate, &d_up, dy, gate, up], limit)?;
        Ok([d_gate, d_up])
    }

    /// Multiplies every row by the sigmoid of its gate.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn gate_rows(&self, x: &Tensor, gate: &Tensor) -> Result<Tensor, CudaError> {
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let columns = x.len() / gate.len().max(1);
        let arguments = Arguments::of(&[&out, &x, &gate]).sizes([columns]);
        let kernel = typed!(Scale, "gate_rows", x.is_bf16());
        let grid = [gate.len() as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, MOST), 0, arguments)?;
        Ok(out)
    }

    /// Gradients of the rows and of their gates.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn gate_rows_backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        gate: &Tensor,
    ) -> Result<[Tensor; 2], CudaError> {
        let dx = self.tensor(x.shape.clone(), x.dtype)?;
        let d_gate = self.tensor(gate.shape.clone(), gate.dtype)?;
        let columns = x.len() / gate.len().max(1);
        let arguments = Arguments::of(&[&dx, &d_gate, &dy, &x, &gate]).sizes([columns]);
        let kernel = typed!(Scale, "gate_rows_backward", x.is_bf16());
        let grid = [gate.len() as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, MOST), 0, arguments)?;
        Ok([dx, d_gate])
    }

    /// Every head's `own` columns of `x`, each followed by the row's `more`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn join(&self, x: &Tensor, more: &Tensor, own: usize) -> Result<Tensor, CudaError> {
        let (heads, shared) = (x.columns() / own, more.columns());
        let columns = heads * (own + shared);
        let out = self.tensor(x.with_columns(columns), x.dtype)?;
        let arguments = Arguments::of(&[&out, &x, &more]).sizes([heads, own, shared]);
        let kernel = typed!(Scale, "join", x.is_bf16());
        let grid = [x.rows() as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(columns, MOST), 0, arguments)?;
        Ok(out)
    }

    /// Gradients of the heads' own columns and, summed over heads, of the shared ones.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn join_backward(
        &self,
        dy: &Tensor,
        own: usize,
        shared: usize,
    ) -> Result<[Tensor; 2], CudaError> {
        let heads = dy.columns() / (own + shared);
        let dx = self.tensor(dy.with_columns(heads * own), dy.dtype)?;
        let d_more = self.tensor(dy.with_columns(shared), dy.dtype)?;
        let arguments = Arguments::of(&[&dx, &d_more, &dy]).sizes([heads, own, shared]);
        let kernel = typed!(Scale, "join_backward", dy.is_bf16());
        let grid = [dy.rows() as u32, 1, 1];
        self.blocks(kernel, grid, threads_of(dy.columns(), MOST), 0, arguments)?;
        Ok([dx, d_more])
    }
}
