//! Everything that ends a command early, with its exit code.

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// A name, file or field given.
    #[error(transparent)]
    Spec(#[from] catalog::SpecError),
    /// A strategy that is not legal.
    #[error(transparent)]
    Strategy(#[from] plans::StrategyError),
    /// A search that cannot run.
    #[error(transparent)]
    Planner(#[from] planner::PlannerError),
    /// A scenario that cannot be priced.
    #[error(transparent)]
    Cost(#[from] costmodel::CostError),
    /// Training that cannot start or go on.
    #[error(transparent)]
    Executor(#[from] executor::ExecutorError),
    /// A measurement that failed.
    #[error(transparent)]
    Profiler(#[from] profiler::ProfilerError),
    /// A cuda device that is not there or does not work.
    #[error(transparent)]
    Cuda(#[from] cuda_device::CudaError),
    /// An export that cannot be.
    #[error(transparent)]
    Export(#[from] interop::export::ExportError),
    /// An error that was said already; its exit code.
    #[cfg_attr(
        not(feature = "mpi"),
        allow(dead_code, reason = "ranks as processes say theirs")
    )]
    #[error("said before")]
    Said(u8),
    /// A configuration that cannot be read as a strategy.
    #[error(transparent)]
    Import(#[from] interop::import::ImportError),
    /// A training log that cannot be read.
    #[error(transparent)]
    Log(#[from] interop::training_log::LogError),
    /// A flag's value.
    #[error("{0}")]
    Usage(String),
    /// A file that cannot be written, or may not be replaced.
    #[error(transparent)]
    File(#[from] catalog::files::FileError),
    /// A name that the tool chose, taken by another plan or what was made from it.
    #[error(
        "{path} is of another plan, and was left as it is; give a name with -o, or replace it with --force"
    )]
    OtherPlan {
        /// Path.
        path: String,
    },
}

impl CliError {
    /// 1 for our faults and the machine's, 2 for bad input.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Cost(costmodel::CostError::Trace(_)) | Self::Profiler(_) | Self::Cuda(_) => 1,
            Self::Executor(error) if error.is_failure() => 1,
            Self::File(catalog::files::FileError::Io { .. }) => 1,
            Self::Said(code) => *code,
            Self::Export(interop::export::ExportError::Inexpressible { .. }) => {
                code::EXPORT_INVALID
            }
            Self::Spec(_)
            | Self::Strategy(_)
            | Self::Planner(_)
            | Self::Cost(_)
            | Self::Executor(_)
            | Self::Export(_)
            | Self::Import(_)
            | Self::Log(_)
            | Self::Usage(_)
            | Self::File(_)
            | Self::OtherPlan { .. } => 2,
        }
    }
}

/// Exit codes beside errors.
pub(crate) mod code {
    /// No feasible plan, or it does not fit.
    pub(crate) const DOES_NOT_FIT: u8 = 3;
    /// A checkpoint that is damaged.
    pub(crate) const DAMAGED: u8 = 2;
    /// A configuration that the target refuses, or cannot express the plan.
    pub(crate) const EXPORT_INVALID: u8 = 4;
    /// A prediction outside the asked tolerance.
    pub(crate) const OUTSIDE_TOLERANCE: u8 = 5;
    /// Interrupted; the best so far was saved.
    pub(crate) const INTERRUPTED: u8 = 130;
}
