//! What an importer is given beside the file, and what it returns.

use catalog::Workload;
use catalog::model::ModelConfig;

use crate::export::Dialect;
use plans::decisions::Decisions;

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
