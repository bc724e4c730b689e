//! Errors of imports.

use crate::config::SyntaxError;

/// Why a configuration was not imported.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ImportError {
    /// The file does not follow its syntax.
    #[error(transparent)]
    Syntax(#[from] SyntaxError),
    /// An embedded schema is broken; a test reads them all.
    #[error(transparent)]
    Schema(#[from] catalog::SpecError),
    /// The system that the file is for cannot be detected.
    #[error(
        "{path}: cannot tell which training system this is for; say so with --to TARGET[@VERSION]"
    )]
    UnknownKind {
        /// Path of the file.
        path: String,
    },
    /// The file's dialect is known but cannot be imported.
    #[error(
        "{path}: {dialect} files can be checked but not imported; importable: megatron-lm, megatron-bridge, torchtitan, deepspeed, accelerate, axolotl, transformers, llama-factory, nanotron, Hugging Face config.json"
    )]
    NotImportable {
        /// Path of the file.
        path: String,
        /// The dialect of the file.
        dialect: String,
    },
    /// A value is invalid, or no strategy can express it.
    #[error("{place}: `{key}`: {message}")]
    Value {
        /// Place of the value as `file:line`.
        place: String,
        /// Key or option with the value.
        key: String,
        /// What is wrong with the value.
        message: String,
    },
    /// A size of the workload is out of range.
    #[error("{path}: {error}")]
    Workload {
        /// Path of the file.
        path: String,
        /// The size, and its allowed range.
        error: catalog::WorkloadError,
    },
    /// A required value is missing.
    #[error("{path}: {what} is not said; {how}")]
    Missing {
        /// Path of the file.
        path: String,
        /// The value that is missing.
        what: String,
        /// How to give it.
        how: String,
    },
}
