//! Builds a timeline from the engine's events.

use catalog::{Bytes, Seconds};
use plans::{Action, Event, Stream, Timeline};

use crate::engine::Record;

/// Collects events into a [`Timeline`].
#[derive(Debug)]
pub struct Recorder {
    timeline: Timeline,
}

impl Recorder {
    /// A recorder for that many pipeline ranks.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        Self {
            timeline: Timeline {
                ranks,
                ..Timeline::default()
            },
        }
    }

    /// Returns the timeline, ordered by rank, stream and start.
    #[must_use]
    pub fn finish(mut self) -> Timeline {
        self.timeline.events.sort_by(|a, b| {
            (a.rank, a.stream)
                .cmp(&(b.rank, b.stream))
                .then(a.start.0.total_cmp(&b.start.0))
        });
        self.timeline
    }
}

impl Record for Recorder {
    fn event(&mut self, rank: u32, stream: Stream, action: Action, start: Seconds, end: Seconds) {
        self.timeline.events.push(Event {
            rank,
            stream,
            action,
            start,
            end,
        });
    }

    fn memory(&mut self, rank: u32, at: Seconds, bytes: Bytes) {
        self.timeline.memory.push((rank, at, bytes));
    }
}
