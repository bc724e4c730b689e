//! Why a measurement failed.

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
