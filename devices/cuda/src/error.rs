//! Errors of the cuda device.

use super::library::Name;
use cpu_device::CpuError;
use cpu_device::WatchError;

/// Why the cuda device cannot go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// A library is not installed on this machine.
    #[error("{library} is missing: none of {tried} can be loaded; {remedy}")]
    Missing {
        /// The missing library.
        library: Name,
        /// File names that were tried.
        tried: String,
        /// How to install it.
        remedy: &'static str,
    },
    /// A library was loaded but lacks a function.
    #[error("{library} at {path} has no function {function}: it is older than this program needs")]
    Function {
        /// The library.
        library: Name,
        /// File that it was loaded from.
        path: String,
        /// Name of the missing function.
        function: &'static str,
    },
    /// A library was loaded but its version is too old.
    #[error("{library} {release} at {path} is older than {oldest}")]
    Old {
        /// The library.
        library: Name,
        /// Version that was loaded.
        release: String,
        /// File that it was loaded from.
        path: String,
        /// The oldest version that is supported.
        oldest: String,
    },
    /// The driver works but reports no device.
    #[error("the NVIDIA driver is here, but it shows no device")]
    NoDevice,
    /// A call of a library returned an error.
    #[error("{call} of {library} failed: {reason} (code {code})")]
    Call {
        /// The library.
        library: Name,
        /// Name of the function.
        call: &'static str,
        /// Error code that it returned.
        code: i32,
        /// The library's description of that code.
        reason: String,
    },
    /// NVML could not report a device's condition; the text says why.
    #[error("NVML does not report the device's condition: {0}")]
    Facts(String),
    /// A source file of kernels does not compile.
    #[error("{file} does not compile for {architecture}: {log}")]
    Compile {
        /// Name of the source file.
        file: String,
        /// The NVRTC option with the architecture, such as `--gpu-architecture=sm_90`.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// The device's memory is full.
    #[error("{asked} bytes do not fit: {live} bytes are in use on this device and {free} are free")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes in use on the device, or only those of this process's tensors.
        live: u64,
        /// Bytes that are free on the device.
        free: u64,
    },
    /// During graph capture, something was asked for that needs the host.
    #[error("{what} cannot be captured in a CUDA graph: it needs the host at every replay")]
    Captured {
        /// The operation that was asked for.
        what: &'static str,
    },
    /// An exchange between ranks through their hosts failed.
    #[error(transparent)]
    Host(#[from] CpuError),
    /// A watch stopped the rank.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// No kernel takes an operator with these operands.
    #[error("operator {operator} in {scope} has no cuda kernel for {reason}")]
    Unsupported {
        /// Kind of the operator.
        operator: String,
        /// Module that it belongs to.
        scope: String,
        /// What the cuda device has no kernel for.
        reason: String,
    },
}

impl CudaError {
    /// The error of an operator in `scope` that no kernel takes.
    pub(crate) fn unsupported(operator: &str, scope: &str, reason: impl Into<String>) -> Self {
        Self::Unsupported {
            operator: operator.to_owned(),
            scope: scope.to_owned(),
            reason: reason.into(),
        }
    }

    /// Why an optional library is not used, as text.
    #[must_use]
    pub fn why_unused(&self) -> String {
        match self {
            Self::Missing { library, .. } => format!("{library} was not found"),
            other => other.to_string(),
        }
    }
}

/// Result of an operation on the cuda device.
pub(crate) type Result<T, E = CudaError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_cudnn_takes_no_part_is_one_line() {
        let (library, path) = (Name::Cudnn, "/lib/libcudnn.so.9".to_owned());
        for (error, says) in [
            (
                CudaError::Missing {
                    library,
                    tried: library.files().join(", "),
                    remedy: library.remedy(),
                },
                "cuDNN was not found",
            ),
            (
                CudaError::Old {
                    library,
                    release: "9.8.0".to_owned(),
                    path: path.clone(),
                    oldest: "9.16".to_owned(),
                },
                "cuDNN 9.8.0 at /lib/libcudnn.so.9 is older than 9.16",
            ),
            (
                CudaError::Function {
                    library,
                    path,
                    function: "cudnnBackendExecute",
                },
                "cuDNN at /lib/libcudnn.so.9 has no function cudnnBackendExecute: it is older than this program needs",
            ),
            (
                CudaError::Call {
                    library,
                    call: "cudnnCreate",
                    code: 1001,
                    reason: "not initialised".to_owned(),
                },
                "cudnnCreate of cuDNN failed: not initialised (code 1001)",
            ),
        ] {
            assert_eq!(error.why_unused(), says);
        }
    }
}
