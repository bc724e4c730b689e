//! What a rank reports of a run and of each step.

use std::collections::BTreeMap;

use dtensor::RoutedRows;
use dtensor::train::{Routed, StateBytes};
use plans::Event;
use serde::{Deserialize, Serialize};

/// A rank's line in the report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Global rank.
    pub rank: usize,
    /// Pipeline rank.
    pub pp: u64,
    /// Tensor-parallel rank.
    pub tp: u64,
    /// Mean loss of every step.
    pub losses: Vec<f64>,
    /// Global gradient norm of every step.
    pub gradient_norms: Vec<f64>,
    /// Seconds of every step.
    pub step_times: Vec<f64>,
    /// What ran when in the last step; nothing of a captured step, which is one call.
    pub events: Vec<Event>,
    /// Seconds that the device took for the passes of every step that was captured: the rest is the host's.
    pub captured_times: Vec<f64>,
    /// States.
    pub states: StateBytes,
    /// Most bytes kept for backward at any moment of a step.
    pub peak_saved: u64,
    /// Rows that reached this rank's experts in that step.
    pub routed: Vec<Routed>,
    /// Memory of the device in the step that used most; nothing where it is not counted.
    pub memory: Option<MemoryUse>,
    /// The library that ran core attention, with its release, or why the project's own kernels did; nothing where no
    /// library was asked.
    pub attention_library: Option<Result<String, String>>,
}

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// The most that tensors and lists had at a time, as they asked for it.
    pub peak: u64,
    /// Taken from the device: with rounding and with pieces that nothing had.
    pub reserved: u64,
}

/// A step that is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Its number, from 0.
    pub step: u64,
    /// Mean loss of its tokens.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Seconds it took on rank 0.
    pub seconds: f64,
    /// Bytes of the device's memory that rank 0 used at most so far; nothing where they are not counted.
    pub peak_memory: Option<u64>,
}

impl RankReport {
    /// Rows that reached this rank's experts when it kept most for backward, by micro-batch and
    /// layer.
    #[must_use]
    pub fn routed_rows(&self) -> BTreeMap<(u32, u64), RoutedRows> {
        let routed = self.routed.iter();
        routed.map(|r| ((r.micro_batch, r.layer), r.rows)).collect()
    }
}
