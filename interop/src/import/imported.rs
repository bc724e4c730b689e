//! Input of an importer beside the file, and its result.

use catalog::Workload;
use catalog::model::ModelConfig;

use crate::export::Dialect;
use plans::decisions::Decisions;

/// Values that the file may leave open.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The model that the file is for.
    pub model: &'a ModelConfig,
    /// Number of devices, where the file does not give it.
    pub gpus: Option<u64>,
    /// Tokens per sequence, where the file does not give them.
    pub seq_len: Option<u64>,
}

/// A configuration read as a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The system and version that the file is for.
    pub dialect: Dialect,
    /// The decisions; their legality is not checked yet.
    pub decisions: Decisions,
    /// Number of devices, sequence length, batch, precision.
    pub workload: Workload,
    /// Sentences on settings that the strategy expresses only approximately.
    pub notes: Vec<String>,
}
