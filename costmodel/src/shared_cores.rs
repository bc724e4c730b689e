//! Ranks that share cores: while more ranks compute than there are cores, each runs slower.
//!
//! The engine runs as if every rank had a core of its own. If at every moment all computing ranks
//! are slowed alike – the operating system shares cores out evenly – the order of everything stays
//! and only the clock stretches: where `n` ranks compute on `c` cores, by `max(1, n/c)`.

use catalog::Seconds;
use plans::{Event, Timeline};

use crate::engine::{Outcome, Record};

/// Stretches the simulated times if a pipeline rank stands for `peers` ranks that share `cores` cores, and passes the stretched
/// events to `record`. `alone` is what happens if every rank has a core of its own.
pub(crate) fn stretch(
    alone: &Timeline,
    outcome: &mut Outcome,
    peers: u64,
    cores: u64,
    record: &mut impl Record,
) {
    let spans = alone
        .events
        .iter()
        .map(|event| (event.start.0, event.end.0));
    let clock = Clock::new(spans, peers as f64 / cores as f64);
    let stretched = |event: &Event| Event {
        start: clock.at(event.start),
        end: clock.at(event.end),
        ..*event
    };
    for event in &alone.events {
        record.event(stretched(event));
    }
    for &(rank, at, bytes) in &alone.memory {
        record.memory(rank, clock.at(at), bytes);
    }
    let overhead = outcome.step_time - outcome.ranks.iter().fold(Seconds(0.0), |t, r| t.max(r.end));
    let mut last = Seconds(0.0);
    for (rank, state) in (0u32..).zip(&mut outcome.ranks) {
        let own = || alone.events.iter().filter(|event| event.rank == rank);
        let lasts = |event: Event| (event.end - event.start).0;
        let by_itself: f64 = own().map(|event| lasts(*event)).sum();
        let shared: f64 = own().map(|event| lasts(stretched(event))).sum();
        if by_itself > 0.0 {
            state.stretch = shared / by_itself;
        }
        state.end = clock.at(state.end);
        last = last.max(state.end);
    }
    outcome.step_time = last + overhead;
}

/// Maps times as if every rank had its own core to times on shared cores.
#[derive(Debug)]
struct Clock {
    /// `(time with own cores, time with shared cores, stretch from there on)`, ascending.
    pieces: Vec<(f64, f64, f64)>,
}

impl Clock {
    /// Of the spans, from start to end, in which ranks compute.
    fn new(spans: impl IntoIterator<Item = (f64, f64)>, ranks_per_core: f64) -> Self {
        let spans = spans.into_iter().filter(|(start, end)| end > start);
        let mut changes: Vec<(f64, i64)> = spans
            .flat_map(|(start, end)| [(start, 1), (end, -1)])
            .collect();
        changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut pieces = vec![(0.0, 0.0, 1.0)];
        let mut computing = 0i64;
        for (at, change) in changes {
            computing += change;
            let (start, shared, stretch) = *pieces.last().expect("it begins with one");
            let now = shared + (at - start) * stretch;
            let next = (computing as f64 * ranks_per_core).max(1.0);
            if at > start {
                pieces.push((at, now, next));
            } else {
                *pieces.last_mut().expect("it begins with one") = (at, now, next);
            }
        }
        Self { pieces }
    }

    fn at(&self, time: Seconds) -> Seconds {
        let after = self.pieces.partition_point(|piece| piece.0 <= time.0);
        let (start, shared, stretch) = self.pieces[after.saturating_sub(1)];
        Seconds(shared + (time.0 - start) * stretch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_stretches_only_where_ranks_outnumber_cores() {
        // Two ranks for each pipeline rank, on two cores: both pipeline ranks together need four.
        let clock = Clock::new([(0.0, 2.0), (1.0, 3.0)], 1.0);
        for (alone, shared) in [(0.0, 0.0), (1.0, 1.0), (1.5, 2.0), (2.0, 3.0), (3.0, 4.0)] {
            assert_eq!(clock.at(Seconds(alone)), Seconds(shared), "{alone}");
        }
    }

    #[test]
    fn work_is_conserved() {
        // Four ranks with a core's work each on one core take four times as long.
        let clock = Clock::new([(0.0, 1.0); 4], 1.0);
        assert_eq!(clock.at(Seconds(1.0)), Seconds(4.0));
    }
}
