//! Why training cannot start or go on.

use comm::CommError;
use cpu_device::{CpuError, WatchError};
use cuda_device::CudaError;
use models::ModelError;
use plans::schedule::ScheduleError;

impl ExecutorError {
    /// Whether another rank's failure is the cause.
    #[must_use]
    pub fn follows(&self) -> bool {
        matches!(
            self,
            Self::Comm(CommError::PeerFailed { .. })
                | Self::Cpu(CpuError::Comm(CommError::PeerFailed { .. }))
                | Self::Cuda(CudaError::Host(CpuError::Comm(
                    CommError::PeerFailed { .. }
                )))
        )
    }

    /// Whether something failed on the way, rather than that what was given cannot be run: another rank,
    /// the transport, a library, the numbers themselves.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Comm(_) | Self::NotFinite { .. } | Self::Panic { .. } => true,
            Self::Cpu(error) => failed_on_cpu(error),
            Self::Cuda(error) => match error {
                CudaError::Host(error) => failed_on_cpu(error),
                CudaError::Watch(error) => matches!(error, WatchError::NotFinite { .. }),
                CudaError::OutOfMemory { .. }
                | CudaError::Captured { .. }
                | CudaError::Unsupported { .. } => false,
                CudaError::Missing { .. }
                | CudaError::Function { .. }
                | CudaError::Old { .. }
                | CudaError::NoDevice
                | CudaError::Facts(_)
                | CudaError::Call { .. }
                | CudaError::Compile { .. } => true,
            },
            Self::Model { .. }
            | Self::Trace(_)
            | Self::Device { .. }
            | Self::Capture { .. }
            | Self::Schedule(_)
            | Self::Data { .. }
            | Self::World { .. }
            | Self::OtherJob { .. }
            | Self::Checkpoint { .. } => false,
        }
    }

    /// What a watch stopped a rank for, if one did.
    #[must_use]
    pub fn watched(&self) -> Option<&WatchError> {
        match self {
            Self::Cpu(CpuError::Watch(error)) | Self::Cuda(CudaError::Watch(error)) => Some(error),
            _ => None,
        }
    }
}

fn failed_on_cpu(error: &CpuError) -> bool {
    match error {
        CpuError::Comm(_) => true,
        CpuError::Watch(error) => matches!(error, WatchError::NotFinite { .. }),
        CpuError::Unsupported { .. } | CpuError::Misaligned { .. } => false,
    }
}

/// Why training cannot start or go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ExecutorError {
    /// The model uses something the executor does not compute.
    #[error("{model} cannot be trained by this executor: {reason}")]
    Model {
        /// Model.
        model: String,
        /// What it uses.
        reason: String,
    },
    /// A block cannot be traced under the plan.
    #[error(transparent)]
    Trace(#[from] ModelError),
    /// A rank cannot go on.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A GPU cannot go on.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The plan asks for what the device does not do.
    #[error("this device cannot run the plan: {reason}")]
    Device {
        /// What.
        reason: String,
    },
    /// A step needs the host for what a captured step would do without.
    #[error("a step cannot be captured: {reason}; use --execution replayed")]
    Capture {
        /// For what.
        reason: &'static str,
    },
    /// Communication stopped.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The schedule does not exist.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The data cannot be used.
    #[error("{path}: {reason}")]
    Data {
        /// File.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The loss or the gradient norm is not a number.
    #[error("step {step}: {what} is {value}; the weights of step {step} are kept as they were")]
    NotFinite {
        /// Step.
        step: u64,
        /// Which number.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// The launcher started another number of ranks than the plan has.
    #[error("the plan has {planned} ranks, {started} were started")]
    World {
        /// Ranks of the plan.
        planned: usize,
        /// Ranks that there are.
        started: usize,
    },
    /// Ranks were started with different jobs.
    #[error("rank {rank} has another {what} than rank {peer}: start all ranks with the same plan")]
    OtherJob {
        /// Who noticed.
        rank: usize,
        /// Who differs.
        peer: usize,
        /// In what.
        what: &'static str,
    },
    /// A rank's thread panicked.
    #[error("rank {rank} panicked: {message}")]
    Panic {
        /// Rank.
        rank: usize,
        /// With what.
        message: String,
    },
    /// A checkpoint cannot be written or read.
    #[error("{path}: {reason}")]
    Checkpoint {
        /// File.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wherever a rank meets another's failure: between blocks, inside one, on a cpu or a GPU.
    #[test]
    fn a_peers_failure_is_no_bad_input() {
        let lost = CommError::PeerFailed {
            rank: 0,
            collective: "mlp".to_owned(),
            failed: 1,
            reason: "its connection broke".to_owned(),
        };
        let late = CommError::Timeout {
            rank: 0,
            peer: 1,
            collective: "mlp".to_owned(),
            waited: std::time::Duration::from_secs(3),
        };
        for comm in [lost, late] {
            let within = CpuError::Comm(comm.clone());
            for error in [
                ExecutorError::Comm(comm),
                ExecutorError::Cpu(within.clone()),
                ExecutorError::Cuda(CudaError::Host(within)),
            ] {
                assert!(error.is_failure(), "{error:?}");
            }
        }
    }

    #[test]
    fn a_layout_that_exact_mode_cannot_sum_is_bad_input() {
        let error = ExecutorError::Cpu(CpuError::Misaligned {
            what: "tokens",
            leaf: 4,
            index: 4,
        });
        assert!(!error.is_failure());
        assert!(error.to_string().contains("--numerics fast"), "{error}");
    }
}
