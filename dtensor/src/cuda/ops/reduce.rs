//! Sums in a fixed order, and the optimizer.

use spec::DType;

use super::{EACH, THREADS};
use crate::cpu::AdamWStep;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::{Kernel, Source, typed};
use crate::cuda::launcher::{Arguments, StepArgument};
use crate::cuda::tensor::{Device, Tensor};

/// Columns of a block of `column_sum`.
const COLUMNS: usize = 256;
/// Rows it treats at a time.
const ROWS: usize = 8;

impl Device {
    /// `gradient += Σ` rows of `x`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn add_column_sum(&self, gradient: &Tensor, x: &Tensor) -> Result<(), CudaError> {
        let (rows, columns) = (x.rows(), x.columns());
        let across = columns.div_ceil(COLUMNS);
        // Enough blocks for every multiprocessor, each with some rows to go through.
        let busy = (4 * self.launcher.multiprocessors() as usize).div_ceil(across.max(1));
        let lines = rows.div_ceil(4 * ROWS).clamp(1, busy.max(1));
        let partial = self.tensor(vec![lines, columns], DType::F32)?;
        let arguments = Arguments::default()
            .with(partial.address())
            .with(x.address())
            .with(rows as i64)
            .with(columns as i64);
        let kernel = typed!(Reduce, "column_sum", x.is_bf16());
        let grid = [across as u32, lines as u32, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)?;
        self.add_lines(gradient, &partial)
    }

    /// `gradient += Σ` lines.
    pub(super) fn add_lines(&self, gradient: &Tensor, partial: &Tensor) -> Result<(), CudaError> {
        let columns = partial.columns();
        let arguments = Arguments::default()
            .with(gradient.address())
            .with(partial.address())
            .with(partial.rows() as i64)
            .with(columns as i64);
        let kernel = Kernel::plain(Source::Reduce, "add_lines");
        let grid = [columns.div_ceil(THREADS as usize) as u32, 1, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)
    }

    /// The sum of squares of all tensors together, in 64 bits and a fixed order. Waits for the device.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn squares(&self, tensors: &[Tensor]) -> Result<f64, CudaError> {
        let blocks = 2 * self.launcher.multiprocessors() as usize;
        let partial = self.tensor(vec![tensors.len() * blocks], DType::I64)?;
        for (index, tensor) in tensors.iter().enumerate() {
            let arguments = Arguments::default()
                .with(partial.address() + (index * blocks * 8) as u64)
                .with(tensor.address())
                .with(tensor.len() as i64);
            let kernel = Kernel::plain(Source::Reduce, "square_sum");
            self.blocks(kernel, [blocks as u32, 1, 1], THREADS, 0, arguments)?;
        }
        let mut sums = vec![0f64; partial.len()];
        let bytes = bytemuck::cast_slice_mut(&mut sums);
        self.launcher.read(partial.address(), bytes)?;
        Ok(sums.iter().sum())
    }

    /// One step of AdamW over flat states `[weights, momentum, variance, gradient]`; `rounded` receives the
    /// weights in bf16.
    ///
    /// # Errors
    /// When the device fails.
    pub fn adamw(
        &self,
        states: [&Tensor; 4],
        rounded: Option<&Tensor>,
        step: &AdamWStep,
    ) -> Result<(), CudaError> {
        let n = states[0].len();
        let arguments = states
            .iter()
            .fold(Arguments::default(), |all, t| all.with(t.address()))
            .with(rounded.map_or(0, Tensor::address))
            .with(n as i64)
            .with(StepArgument {
                rate: step.rate,
                betas: step.betas,
                corrections: step.corrections,
                epsilon: step.epsilon,
                keep: step.keep,
                scale: step.scale,
            });
        let kernel = Kernel::plain(Source::Reduce, "adamw");
        self.flat(kernel, n.div_ceil(EACH), arguments)
    }
}
