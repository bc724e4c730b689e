//! Errors of training.

use comm::CommError;
use cpu_device::{CpuError, WatchError};
use cuda_device::CudaError;
use models::ModelError;
use plans::schedule::ScheduleError;

impl ExecutorError {
    /// Turns a checkpoint error into one of saving, which is a failure and not a wrong input.
    pub(crate) fn while_saving(self) -> Self {
        match self {
            Self::Checkpoint { path, reason } => Self::Unsaved { path, reason },
            other => other,
        }
    }

    /// Whether the executor or its device cannot run the plan.
    #[must_use]
    pub fn is_of_plan(&self) -> bool {
        let cpu = match self {
            Self::Cpu(error) | Self::Cuda(CudaError::Host(error)) => Some(error),
            _ => None,
        };
        matches!(
            self,
            Self::Model { .. }
                | Self::Positions { .. }
                | Self::Trace(_)
                | Self::Device { .. }
                | Self::Schedule(_)
        ) || matches!(
            cpu,
            Some(CpuError::Unsupported { .. } | CpuError::Misaligned { .. })
        )
    }

    /// Whether another rank's failure is the cause.
    #[must_use]
    pub fn follows(&self) -> bool {
        matches!(self.of_ranks(), Some(CommError::PeerFailed { .. }))
    }

    /// What failed between ranks, if something did.
    pub(crate) fn of_ranks(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error)
            | Self::Cpu(CpuError::Comm(error))
            | Self::Cuda(CudaError::Host(CpuError::Comm(error))) => Some(error),
            _ => None,
        }
    }

    /// Whether something failed while running (another rank, the transport, a library, the numbers), as opposed to
    /// invalid input.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Comm(_) | Self::NotFinite { .. } | Self::Panic { .. } | Self::Unsaved { .. } => {
                true
            }
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
            | Self::Positions { .. }
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

    /// The error of a watch that stopped a rank, if one did.
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
        /// Name of the model.
        model: String,
        /// What the executor cannot compute.
        reason: String,
    },
    /// Sequences are longer than the model's table of positions.
    #[error(
        "{model} has a table of {positions} positions, and sequences of the plan have {seq_len} tokens; expected \
         sequences of at most {positions}"
    )]
    Positions {
        /// Name of the model.
        model: String,
        /// Positions that the table has rows for.
        positions: u64,
        /// Tokens per sequence.
        seq_len: u64,
    },
    /// A block cannot be traced under the plan.
    #[error(transparent)]
    Trace(#[from] ModelError),
    /// A rank failed on the CPU.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A rank failed on a GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The plan needs something that the device cannot do.
    #[error("this device cannot run the plan: {reason}")]
    Device {
        /// What the device cannot do.
        reason: String,
    },
    /// The host takes part in a step, so the step cannot be captured.
    #[error("a step cannot be captured: {reason}; use --execution replayed")]
    Capture {
        /// What the host is needed for.
        reason: &'static str,
    },
    /// Communication stopped.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The schedule does not exist for this strategy.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The data cannot be used.
    #[error("{path}: {reason}")]
    Data {
        /// Path of the file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The loss or the gradient norm is not finite.
    #[error("step {step}: {what} is {value}; the weights of step {step} are kept as they were")]
    NotFinite {
        /// The step, from 0.
        step: u64,
        /// Name of the number that is not finite: the loss or the gradient norm.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// The launcher started a different number of ranks than the plan has.
    #[error("the plan has {planned} ranks, {started} were started")]
    World {
        /// Number of ranks in the plan.
        planned: usize,
        /// Number of ranks started.
        started: usize,
    },
    /// Ranks were started with different jobs.
    #[error("rank {rank} has another {what} than rank {peer}: start all ranks with the same plan")]
    OtherJob {
        /// The rank that noticed.
        rank: usize,
        /// The rank whose job differs.
        peer: usize,
        /// The part of the job that differs between the two ranks, such as its strategy.
        what: &'static str,
    },
    /// A rank's thread panicked.
    #[error("rank {rank} panicked: {message}")]
    Panic {
        /// The rank that panicked.
        rank: usize,
        /// The panic message.
        message: String,
    },
    /// A checkpoint, or the folder to save it in, cannot be used.
    #[error("{path}: {reason}")]
    Checkpoint {
        /// Path of the file or folder.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A checkpoint could not be saved, as on a full disk.
    #[error("{path}: {reason}")]
    Unsaved {
        /// Path of the file or folder.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer's failure is recognised between blocks and inside one, on a cpu and on a GPU.
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
            what: "features of lm_head.weight".to_owned(),
            leaf: 8,
            size: 100,
            cut: 50,
        });
        assert!(error.is_of_plan());
        assert!(!error.is_failure());
        assert!(error.to_string().contains("--numerics fast"), "{error}");
    }
}
