//! Launch dimensions of kernels.

use crate::error::CudaError;
use crate::kernels::Kernel;
use crate::launcher::{Arguments, Launch};
use crate::tensor::Device;

/// Elements that a thread processes at a time.
pub(super) const EACH: usize = 8;
/// Threads per block, unless a kernel asks for another number.
pub(super) const THREADS: u32 = 256;
/// Most blocks per SM; beyond this, each block loops over more elements.
pub(super) const WAVES: u32 = 32;

impl Device {
    /// Launches a kernel whose threads loop over `pieces` of eight elements.
    pub(super) fn flat(
        &self,
        kernel: Kernel,
        pieces: usize,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        if pieces == 0 {
            return Ok(());
        }
        let most = self.launcher.multiprocessors() * WAVES;
        let blocks = (pieces as u64).div_ceil(u64::from(THREADS));
        let grid = [(blocks.min(u64::from(most))) as u32, 1, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)
    }

    /// Launches a kernel, unless the grid is empty.
    pub(super) fn blocks(
        &self,
        kernel: Kernel,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let launch = Launch {
            grid,
            threads,
            shared,
        };
        self.launcher.launch(kernel, launch, arguments)
    }
}

/// Threads, in whole warps, for a row of `columns` elements at eight per thread; at most `most`.
pub(super) fn threads_of(columns: usize, most: u32) -> u32 {
    (columns.div_ceil(EACH) as u32)
        .next_multiple_of(32)
        .min(most)
}

/// The error for operands that no kernel supports.
pub(super) fn unsupported(operator: &str, reason: String) -> CudaError {
    CudaError::unsupported(operator, "the cuda device", reason)
}
