//! Sums in a fixed order.

use catalog::DType;

use super::grid::THREADS;
use crate::error::CudaError;
use crate::kernels::{Kernel, Source, typed};
use crate::launcher::Arguments;
use crate::tensor::{Device, Tensor};

/// Number of columns that one thread block of the kernel `column_sum` works on. It computes a partial sum of each.
const COLUMNS: usize = 256;
/// Number of rows that one thread block of the kernel `column_sum` works on side by side: one for each of its warps.
const ROWS: usize = 8;
/// Number of thread blocks of `column_sum` that run on an SM at the same time. Its registers suffice for no more.
const AT_ONCE: usize = 5;
/// Number of columns that one thread block of the kernel `add_lines` works on, and number of threads for each column.
const LANES: usize = 32;

impl Device {
    /// `gradient += Σ` rows of `x`.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn add_column_sum(&self, gradient: &Tensor, x: &Tensor) -> Result<(), CudaError> {
        let (rows, columns) = (x.rows(), x.columns());
        let across = columns.div_ceil(COLUMNS);
        // As many blocks as run at once, each looping over some rows.
        let room = AT_ONCE * self.launcher.multiprocessors() as usize;
        let busy = room / across.max(1);
        let lines = rows.div_ceil(4 * ROWS).clamp(1, busy.max(1));
        let partial = self.tensor(vec![lines, columns], DType::F32)?;
        let arguments = Arguments::of(&[&partial, &x]).sizes([rows, columns]);
        let kernel = typed!(Reduce, "column_sum", x.is_bf16());
        let grid = [across as u32, lines as u32, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)?;
        self.add_lines(gradient, &partial)
    }

    /// `gradient += Σ` rows of `partial`.
    pub(super) fn add_lines(&self, gradient: &Tensor, partial: &Tensor) -> Result<(), CudaError> {
        let columns = partial.columns();
        let arguments = Arguments::of(&[&gradient, &partial]).sizes([partial.rows(), columns]);
        let kernel = Kernel::plain(Source::Reduce, "add_lines");
        let grid = [columns.div_ceil(LANES) as u32, 1, 1];
        self.blocks(kernel, grid, (LANES * LANES) as u32, 0, arguments)
    }
}
