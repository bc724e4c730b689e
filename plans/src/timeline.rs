//! Timelines of a step, predicted or measured: the type that simulator and executor share.

use catalog::{Bytes, Seconds};

use crate::schedule::{Action, ActionKind};

/// The stream of a rank on which an event runs.
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
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Event {
    /// Pipeline rank (representative of its tp·cp·dp peers).
    pub rank: u32,
    /// Stream of the rank that it runs on.
    pub stream: Stream,
    /// What runs.
    pub action: Action,
    /// Start, in seconds from the beginning of the step.
    pub start: Seconds,
    /// End, in seconds from the beginning of the step.
    pub end: Seconds,
}

impl Event {
    /// The virtual stage and the micro-batch of this event; `None` for events of the whole step, such as the optimizer.
    #[must_use]
    pub fn of(&self) -> Option<[u32; 2]> {
        let Action {
            kind,
            stage,
            micro_batch,
        } = self.action;
        (kind != ActionKind::Optim).then_some([stage, micro_batch])
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
