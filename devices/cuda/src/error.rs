//! What can go wrong on a cuda device.

use super::library::Name;
use cpu_device::CpuError;
use cpu_device::WatchError;

/// Why the cuda device cannot go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    /// A library is not on this machine.
    #[error("{library} is missing: none of {tried} can be loaded; {remedy}")]
    Missing {
        /// Which.
        library: Name,
        /// File names tried.
        tried: String,
        /// Where it is had.
        remedy: &'static str,
    },
    /// A library is there but lacks a function.
    #[error("{library} at {path} has no function {function}: it is older than this program needs")]
    Function {
        /// Which.
        library: Name,
        /// File.
        path: String,
        /// What it lacks.
        function: &'static str,
    },
    /// A library is there but of a release that is not used.
    #[error("{library} {release} at {path} is older than {oldest}")]
    Old {
        /// Which.
        library: Name,
        /// Its release.
        release: String,
        /// File.
        path: String,
        /// The first release that is used.
        oldest: String,
    },
    /// A driver without a device.
    #[error("the NVIDIA driver is here, but it shows no device")]
    NoDevice,
    /// A call failed.
    #[error("{call} of {library} failed: {reason} (code {code})")]
    Call {
        /// Which library.
        library: Name,
        /// Function.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// What that means.
        reason: String,
    },
    /// What NVML says instead of a device's condition.
    #[error("NVML does not tell the device's condition: {0}")]
    Facts(String),
    /// Kernels that do not compile.
    #[error("{file} does not compile for {architecture}: {log}")]
    Compile {
        /// Source file.
        file: String,
        /// Target.
        architecture: String,
        /// The compiler's words.
        log: String,
    },
    /// The device's memory is full.
    #[error("{asked} bytes do not fit: {live} bytes are in use on this device and {free} are free")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes in use by this process's tensors.
        live: u64,
        /// Bytes the device has left.
        free: u64,
    },
    /// Something that the host and the device must do together, while work is only recorded.
    #[error("{what} cannot be part of captured work: it needs the host every time")]
    Captured {
        /// What was asked for.
        what: &'static str,
    },
    /// What ranks exchange through the host failed.
    #[error(transparent)]
    Host(#[from] CpuError),
    /// A watch stopped it.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// An operator with operands that no kernel takes.
    #[error("operator {operator} in {scope} has no cuda kernel for {reason}")]
    Unsupported {
        /// Operator.
        operator: String,
        /// Module.
        scope: String,
        /// What is not there.
        reason: String,
    },
}

impl CudaError {
    /// Why a library that one can do without takes no part.
    #[must_use]
    pub fn why_unused(&self) -> String {
        match self {
            Self::Missing { library, .. } => format!("{library} was not found"),
            other => other.to_string(),
        }
    }
}

/// What a device made, or why it could not.
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
