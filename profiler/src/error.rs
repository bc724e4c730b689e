//! Why a measurement failed.

use comm::CommError;
use cpu_device::CpuError;
use cuda_device::CudaError;

/// Why a measurement failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfilerError {
    /// A kernel cannot run on the cpu device.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// Ranks cannot communicate.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A GPU is missing or failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A kernel returned a number that is infinite or NaN.
    #[error("{kernel} returned {value}")]
    NotFinite {
        /// Name of the kernel.
        kernel: String,
        /// The number it returned.
        value: f32,
    },
    /// A kernel's result differs from the host's.
    #[error("{kernel}: element {element} is {got}, the host computes {want}")]
    Wrong {
        /// Name of the kernel, with its sizes.
        kernel: String,
        /// Index of the element in its result.
        element: usize,
        /// Value on the device.
        got: f64,
        /// Value that the host computed.
        want: f64,
    },
}
