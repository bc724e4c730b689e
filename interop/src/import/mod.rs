//! Configurations of training systems as strategies, so that the setup a user has today can be
//! estimated, explained and compared.

mod deepspeed;
pub mod document;
mod megatron;
mod torchtitan;

pub use document::Document;
pub(crate) use megatron::parse_layout;

use catalog::model::ModelConfig;
use catalog::{Workload, WorkloadSizes};

use crate::config::SyntaxError;
use crate::export::Dialect;
use plans::strategy::Decisions;

/// What the file may leave open.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// Model that the file is about.
    pub model: &'a ModelConfig,
    /// Devices, where the file does not say.
    pub gpus: Option<u64>,
    /// Tokens per sequence, where the file does not say.
    pub seq_len: Option<u64>,
}

/// A configuration as a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// What the file is for.
    pub dialect: Dialect,
    /// The decisions; not checked yet.
    pub decisions: Decisions,
    /// Devices, sequence, batch, precision.
    pub workload: Workload,
    /// What a strategy says only nearly, one sentence each.
    pub notes: Vec<String>,
}

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

/// Reads a strategy out of a configuration.
///
/// # Errors
/// When something needed is missing, makes no sense, or has no strategy that stands for it.
pub fn import(document: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    match document.dialect {
        Dialect::MegatronLm => megatron::import(document, given),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            torchtitan::import(document, given)
        }
        Dialect::DeepSpeed => deepspeed::import(document, given),
        Dialect::MegatronBridge
        | Dialect::Accelerate
        | Dialect::Axolotl
        | Dialect::Nanotron
        | Dialect::VeScale => Err(ImportError::NotImportable {
            path: document.path.clone(),
            dialect: document.dialect.name(),
        }),
    }
}

/// The sizes that multiply to the number of devices.
pub(crate) fn data_parallel(document: &Document, gpus: u64, rest: u64) -> Result<u64, ImportError> {
    if rest == 0 || gpus == 0 || !gpus.is_multiple_of(rest) {
        return Err(ImportError::Missing {
            path: document.path.clone(),
            what: "a data-parallel size".to_owned(),
            how: format!("{gpus} GPUs do not divide into tp·cp·pp = {rest}; give the right --gpus"),
        });
    }
    Ok(gpus / rest)
}

/// Micro-batches per rank and step.
pub(crate) fn micro_batches(
    document: &Document,
    key: &str,
    global: u64,
    per_step: u64,
) -> Result<u64, ImportError> {
    if per_step == 0 || global == 0 || !global.is_multiple_of(per_step) {
        let message =
            format!("{global} sequences are not a multiple of micro-batch · dp = {per_step}");
        return Err(ImportError::Value {
            place: document.place(key),
            key: key.to_owned(),
            message,
        });
    }
    Ok(global / per_step)
}

/// The file's workload.
pub(crate) fn workload(document: &Document, sizes: WorkloadSizes) -> Result<Workload, ImportError> {
    Workload::new(sizes).map_err(|error| ImportError::Workload {
        path: document.path.clone(),
        error,
    })
}
