//! Why a configuration is not imported.

use crate::config::SyntaxError;

/// Why a file is not imported.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ImportError {
    /// It is not what its syntax asks.
    #[error(transparent)]
    Syntax(#[from] SyntaxError),
    /// An embedded schema is broken; a test reads them all.
    #[error(transparent)]
    Schema(#[from] catalog::SpecError),
    /// Nobody knows what it is for.
    #[error(
        "{path}: cannot tell which training system this is for; say so with --to TARGET[@VERSION]"
    )]
    UnknownKind {
        /// File.
        path: String,
    },
    /// The kind is known but cannot be imported.
    #[error(
        "{path}: {dialect} files can be checked but not imported; importable: megatron-lm, torchtitan, deepspeed, Hugging Face config.json"
    )]
    NotImportable {
        /// File.
        path: String,
        /// What it is for.
        dialect: String,
    },
    /// A value makes no sense, or no strategy stands for it.
    #[error("{place}: `{key}`: {message}")]
    Value {
        /// `file:line`.
        place: String,
        /// Key or option.
        key: String,
        /// What is wrong.
        message: String,
    },
    /// A size of what is trained is out of range.
    #[error("{path}: {error}")]
    Workload {
        /// File.
        path: String,
        /// Which size, and its range.
        error: catalog::WorkloadError,
    },
    /// Something needed stands nowhere.
    #[error("{path}: {what} is not said; {how}")]
    Missing {
        /// File.
        path: String,
        /// What.
        what: String,
        /// How to say it.
        how: String,
    },
}
