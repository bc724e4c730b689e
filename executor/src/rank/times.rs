//! When the actions of a step ran.

use catalog::Seconds;
use plans::{Action, ActionKind, Event, Stream};

use super::member::Rank;
use crate::device::Device;

impl<D: Device> Rank<'_, D> {
    /// Events of the step's actions; `laps` holds the seconds before and during each action.
    pub(super) fn events(&self, laps: &[f64]) -> Vec<Event> {
        let mut now = 0.0;
        let timed = self.actions.iter().zip(laps.chunks_exact(2));
        timed
            .map(|(&action, lap)| {
                let from = now + lap[0];
                now = from + lap[1];
                event(action, self.place.pp, from, now)
            })
            .collect()
    }
}

fn event(a: Action, pp: u64, from: f64, to: f64) -> Event {
    let stream = match a.kind {
        ActionKind::RecvF | ActionKind::RecvB | ActionKind::SendF | ActionKind::SendB => {
            Stream::Pipeline
        }
        ActionKind::Unshard | ActionKind::Reshard | ActionKind::ReduceGrad => Stream::DataParallel,
        _ => Stream::Compute,
    };
    Event {
        rank: pp as u32,
        stream,
        action: a,
        start: Seconds(from),
        end: Seconds(to),
    }
}
