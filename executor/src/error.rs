//! Why training cannot start or go on.

use dtensor::comm::CommError;
use dtensor::cpu::{CpuError, WatchError};
use dtensor::cuda::CudaError;
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

    /// What a watch stopped a rank for, if one did.
    #[must_use]
    pub fn watched(&self) -> Option<&WatchError> {
        match self {
            Self::Cpu(CpuError::Watch(error)) | Self::Cuda(CudaError::Watch(error)) => Some(error),
            _ => None,
        }
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
