//! What is trained, apart from the model: sequence, batch, precision, number of devices.

use crate::dtype::Precision;

/// A training workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Workload {
    /// Devices in the job.
    pub gpus: u64,
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Sequences per optimizer step, over all devices.
    pub global_batch: u64,
    /// Precision of linear layers.
    pub precision: Precision,
}

impl Workload {
    /// Tokens per optimizer step.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.seq_len * self.global_batch
    }
}
