//! Ranks that share cores: while more ranks compute than there are cores, each runs slower.
//!
//! The engine runs as if every rank had a core of its own. If at every moment all computing ranks
//! are slowed alike – the operating system shares cores out evenly – the order of everything stays
//! and only the clock stretches: where `n` ranks compute on `c` cores, by `max(1, n/c)`.

use catalog::{Bytes, Seconds};
use plans::{Action, Stream};

use crate::engine::{Outcome, Record};

/// Records when ranks compute.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    /// `(pipeline rank, start, end)` in seconds; each rank's in order of time.
    intervals: Vec<(u32, f64, f64)>,
    events: Vec<(u32, Stream, Action, Seconds, Seconds)>,
    memory: Vec<(u32, Seconds, Bytes)>,
}

impl Record for Busy {
    fn event(&mut self, rank: u32, stream: Stream, action: Action, start: Seconds, end: Seconds) {
        self.intervals.push((rank, start.0, end.0));
        self.events.push((rank, stream, action, start, end));
    }

    fn memory(&mut self, rank: u32, at: Seconds, bytes: Bytes) {
        self.memory.push((rank, at, bytes));
    }
}

impl Busy {
    /// Stretches the simulated times if a pipeline rank stands for `peers` ranks that share `cores` cores, and passes
    /// the stretched events to `record`.
    pub(crate) fn stretch(
        self,
        outcome: &mut Outcome,
        peers: u64,
        cores: u64,
        record: &mut impl Record,
    ) {
        let clock = Clock::new(&self.intervals, peers as f64 / cores as f64);
        for &(rank, stream, action, start, end) in &self.events {
            record.event(rank, stream, action, clock.at(start), clock.at(end));
        }
        for &(rank, at, bytes) in &self.memory {
            record.memory(rank, clock.at(at), bytes);
        }
        let overhead =
            outcome.step_time - outcome.ranks.iter().fold(Seconds(0.0), |t, r| t.max(r.end));
        let mut last = Seconds(0.0);
        for (rank, state) in (0u32..).zip(&mut outcome.ranks) {
            let own = || self.intervals.iter().filter(|i| i.0 == rank);
            let alone: f64 = own().map(|i| i.2 - i.1).sum();
            let shared: f64 = own()
                .map(|i| (clock.at(Seconds(i.2)) - clock.at(Seconds(i.1))).0)
                .sum();
            if alone > 0.0 {
                state.stretch = shared / alone;
            }
            state.end = clock.at(state.end);
            last = last.max(state.end);
        }
        outcome.step_time = last + overhead;
    }
}

/// Maps times as if every rank had its own core to times on shared cores.
#[derive(Debug)]
struct Clock {
    /// `(time with own cores, time with shared cores, stretch from there on)`, ascending.
    pieces: Vec<(f64, f64, f64)>,
}

impl Clock {
    fn new(intervals: &[(u32, f64, f64)], ranks_per_core: f64) -> Self {
        let mut changes: Vec<(f64, i64)> = intervals
            .iter()
            .filter(|(_, start, end)| end > start)
            .flat_map(|&(_, start, end)| [(start, 1), (end, -1)])
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
        let clock = Clock::new(&[(0, 0.0, 2.0), (1, 1.0, 3.0)], 1.0);
        for (alone, shared) in [(0.0, 0.0), (1.0, 1.0), (1.5, 2.0), (2.0, 3.0), (3.0, 4.0)] {
            assert_eq!(clock.at(Seconds(alone)), Seconds(shared), "{alone}");
        }
    }

    #[test]
    fn work_is_conserved() {
        // Four ranks with a core's work each on one core take four times as long.
        let intervals: Vec<_> = (0..4).map(|rank| (rank, 0.0, 1.0)).collect();
        assert_eq!(Clock::new(&intervals, 1.0).at(Seconds(1.0)), Seconds(4.0));
    }
}
