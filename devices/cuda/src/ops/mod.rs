//! Operators on a device's tensors: which kernels run, on how many threads. One file per file of
//! kernels.

mod attention;
mod eight_bits;
mod elementwise;
mod expert;
mod norm;
mod optimizer;
mod product;
mod reduce;
mod scale;
mod token;

pub use attention::AttentionCall;
pub use eight_bits::{Lies, Matrix8};
pub use elementwise::{Dropout, Rope};
pub use expert::{Level, Route};
pub use norm::NormGradient;
pub use optimizer::{Optimizer, Weights};
pub use token::{Losses, RowOrder};

use super::error::CudaError;
use super::kernels::Kernel;
use super::launcher::{Arguments, Launch};
use super::tensor::Device;

/// Elements that a thread treats at a time.
const EACH: usize = 8;
/// Threads of a block where nothing asks for another number.
const THREADS: u32 = 256;
/// Blocks per multiprocessor above which they go round again.
const WAVES: u32 = 32;

impl Device {
    /// Runs a kernel whose threads go over `pieces` of eight elements.
    fn flat(&self, kernel: Kernel, pieces: usize, arguments: Arguments) -> Result<(), CudaError> {
        if pieces == 0 {
            return Ok(());
        }
        let most = self.launcher.multiprocessors() * WAVES;
        let blocks = (pieces as u64).div_ceil(u64::from(THREADS));
        let grid = [(blocks.min(u64::from(most))) as u32, 1, 1];
        self.blocks(kernel, grid, THREADS, 0, arguments)
    }

    /// Runs a kernel, if any block is to run.
    fn blocks(
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

/// Threads, in whole warps, for a row of so many elements, eight each; at most `most`.
fn threads_of(columns: usize, most: u32) -> u32 {
    (columns.div_ceil(EACH) as u32)
        .next_multiple_of(32)
        .min(most)
}

/// A typed refusal.
fn unsupported(operator: &str, reason: String) -> CudaError {
    CudaError::Unsupported {
        operator: operator.to_owned(),
        scope: "the cuda device".to_owned(),
        reason,
    }
}
