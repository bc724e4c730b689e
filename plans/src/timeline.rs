//! Timelines of a step, predicted or measured: the type that simulator and executor share.

use catalog::{Bytes, Seconds};

/// Where on a rank an event runs.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub enum Stream {
    /// The stream of forward, backward and optimizer kernels.
    Compute,
    /// The stream of sends and receives between pipeline stages.
    Pipeline,
    /// The stream of data-parallel gathers and reductions.
    DataParallel,
}

/// One interval on one stream of one pipeline rank.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Event {
    /// Pipeline rank (representative of its tp·cp·dp peers).
    pub rank: u32,
    /// Stream of the rank that it runs on.
    pub stream: Stream,
    /// What runs, such as `F s3 m7` or `reduce-scatter layer 12`.
    pub name: String,
    /// Virtual stage that it belongs to, if any.
    pub stage: Option<u32>,
    /// Micro-batch that it belongs to, if any.
    pub micro_batch: Option<u32>,
    /// Start, in seconds from the beginning of the step.
    pub start: Seconds,
    /// End, in seconds from the beginning of the step.
    pub end: Seconds,
}

impl Event {
    /// The name without stage and micro-batch, to group events by.
    #[must_use]
    pub fn phase(&self) -> &str {
        match self.stage {
            Some(stage) => {
                let end = self.name.find(&format!(" s{stage} "));
                &self.name[..end.unwrap_or(self.name.len())]
            }
            None => &self.name,
        }
    }
}

/// The events of a step on all pipeline ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Number of pipeline ranks.
    pub ranks: u32,
    /// Events, ordered by rank, stream, start.
    pub events: Vec<Event>,
    /// Memory in use after each change: `(rank, time, bytes)`.
    pub memory: Vec<(u32, Seconds, Bytes)>,
}
