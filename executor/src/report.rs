//! What a rank reports about a run and each step.

use std::collections::BTreeMap;

use dtensor::RoutedRows;
use dtensor::train::{Routed, StateBytes};
use plans::Event;
use serde::{Deserialize, Serialize};

/// A rank's entry in the report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Global rank.
    pub rank: usize,
    /// Pipeline rank.
    pub pp: u64,
    /// Tensor-parallel rank.
    pub tp: u64,
    /// Mean loss of each step.
    pub losses: Vec<f64>,
    /// Global gradient norm of each step.
    pub gradient_norms: Vec<f64>,
    /// Duration of each step in seconds.
    pub step_times: Vec<f64>,
    /// When each action ran in the last step; empty for captured steps, which are single calls.
    pub events: Vec<Event>,
    /// Seconds of each step's first captured part: passes, and on a single rank the update too.
    pub captured_times: Vec<f64>,
    /// Bytes of parameters, gradients and optimizer states.
    pub states: StateBytes,
    /// Peak of bytes kept for backward within a step.
    pub peak_saved: u64,
    /// Row counts of this rank's experts in the step with that peak.
    pub routed: Vec<Routed>,
    /// Device memory in the step that used most; `None` if the device does not count it.
    pub memory: Option<MemoryUse>,
    /// The library that ran core attention, with its version, or why the project's own kernels did; `None` if no
    /// library was requested.
    pub attention_library: Option<Result<String, String>>,
}

/// Device memory use in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Peak of bytes allocated at one time, as requested.
    pub peak: u64,
    /// Bytes reserved from the device, with rounding and unused blocks.
    pub reserved: u64,
}

/// The result of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean loss over its tokens.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub gradient_norm: f64,
    /// Duration on rank 0 in seconds.
    pub seconds: f64,
    /// Peak device memory of rank 0 so far in bytes; `None` if the device does not count it.
    pub peak_memory: Option<u64>,
}

impl RankReport {
    /// Row counts of this rank's experts in the step with the highest memory for backward, by micro-batch and layer.
    #[must_use]
    pub fn routed_rows(&self) -> BTreeMap<(u32, u64), RoutedRows> {
        let routed = self.routed.iter();
        routed.map(|r| ((r.micro_batch, r.layer), r.rows)).collect()
    }
}
