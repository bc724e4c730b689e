//! Measures this machine: kernels of the cpu device as the executor runs them, the optimizer, and
//! messages between ranks; and the kernels of a GPU (`cuda`).
//!
//! Blocks are measured whole, so that every operator runs on operands as warm or cold as in
//! training, and on as many ranks at a time as will share the machine; a rank's peers are echoes
//! of itself, so that what it computes for a collective is measured without waiting.

mod blocks;
pub mod cuda;
mod lanes;
mod machine;
mod primitives;
mod visits;

pub use blocks::{BlockRequest, blocks};
pub use lanes::Effort;
pub use machine::machine;
pub use primitives::{messages, states};
pub use visits::{VISITS, middle};

use comm::CommError;
use cpu_device::CpuError;
use cuda_device::CudaError;

/// Why a measurement failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfilerError {
    /// A kernel cannot run.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// Ranks cannot communicate.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A GPU is missing or failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A kernel returned numbers that are not numbers.
    #[error("{kernel} returned {value}")]
    NotFinite {
        /// Kernel.
        kernel: String,
        /// What it returned.
        value: f32,
    },
    /// A kernel's result is another than the host's.
    #[error("{kernel}: element {element} is {got}, the host computes {want}")]
    Wrong {
        /// Kernel, with its sizes.
        kernel: String,
        /// Which element of its result.
        element: usize,
        /// What it is.
        got: f64,
        /// What it should be.
        want: f64,
    },
}
