//! Times of messages between GPUs, from a profile.
//!
//! Times are measured per kind of message and number of ranks on one host, and hold for any such ranks. Between two
//! measured sizes the time is interpolated log-log; below the smallest it stays that of the smallest; beyond the
//! largest it grows in proportion to the size.

use std::collections::BTreeMap;

use catalog::profile::{Measured, Profile};
use catalog::{Bytes, Seconds, elementary};
use dtensor::CollectiveKind;

/// Measured sizes of messages, `(bytes, seconds)` in ascending order, by kind and number of ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct BetweenGpus(BTreeMap<(String, u64), Vec<(u64, f64)>>);

impl BetweenGpus {
    /// Collects the messages that a profile measured.
    pub(super) fn of(profile: &Profile) -> Self {
        let mut all: BTreeMap<(String, u64), Vec<(u64, f64)>> = BTreeMap::new();
        for m in &profile.measured {
            if let Some((ranks, bytes)) = Self::sizes(m) {
                let sizes = all.entry((m.kernel.clone(), ranks)).or_default();
                sizes.push((bytes, m.seconds));
            }
        }
        for sizes in all.values_mut() {
            sizes.sort_unstable_by_key(|size| size.0);
        }
        Self(all)
    }

    /// `(ranks, bytes)` of a measured message inside a host; `None` for any other measurement.
    pub(super) fn sizes(measured: &Measured) -> Option<(u64, u64)> {
        match (measured.kernel.starts_with("nccl "), &measured.sizes[..]) {
            (true, &[ranks, bytes]) => Some((ranks, bytes)),
            _ => None,
        }
    }

    /// Time of a message between that many ranks; `None` if its kind was not measured between that many.
    pub(crate) fn time(&self, kind: CollectiveKind, bytes: Bytes, ranks: u64) -> Option<Seconds> {
        let points = self.0.get(&(name(kind).to_owned(), ranks))?;
        between(points, bytes.0).map(Seconds)
    }

    /// Number of measurements.
    pub(super) fn count(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Numbers of ranks between which a message was measured, ascending.
    pub(super) fn groups(&self) -> Vec<u64> {
        let mut ranks: Vec<u64> = self.0.keys().map(|(_, ranks)| *ranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// The name of a message in a profile. A step of a ring is a send to the neighbour.
pub(crate) fn name(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllReduce => "nccl all-reduce",
        CollectiveKind::AllGather => "nccl all-gather",
        CollectiveKind::ReduceScatter => "nccl reduce-scatter",
        CollectiveKind::AllToAll => "nccl all-to-all",
        CollectiveKind::SendRecv | CollectiveKind::RingExchange => "nccl send and receive",
    }
}

/// Interpolates the time at a size from measured `(size, seconds)` in ascending order.
fn between(points: &[(u64, f64)], bytes: u64) -> Option<f64> {
    let after = points.partition_point(|point| point.0 < bytes);
    let (first, last) = (points.first()?, points.last()?);
    let (Some(upper), true) = (points.get(after), after > 0) else {
        let beyond = bytes as f64 / last.0 as f64;
        return Some(if after == 0 { first.1 } else { last.1 * beyond });
    };
    let lower = points[after - 1];
    let log = |a: u64, b: u64| elementary::ln(a as f64 / b as f64);
    let share = log(bytes, lower.0) / log(upper.0, lower.0);
    Some(lower.1 * elementary::powf(upper.1 / lower.1, share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_lie_between_what_was_measured() {
        let points = [(1 << 10, 1e-5), (1 << 20, 2e-5), (1 << 24, 32e-5)];
        for (bytes, wanted) in [
            (1, 1e-5),
            (1 << 10, 1e-5),
            (1 << 15, 1e-5 * 2f64.sqrt()),
            (1 << 20, 2e-5),
            // Sixteen times the time at sixteen times the size: linear.
            (1 << 22, 8e-5),
            (1 << 24, 32e-5),
            (1 << 26, 128e-5),
        ] {
            let time = between(&points, bytes).expect("measured");
            assert!((time / wanted - 1.0).abs() < 1e-9, "{bytes}: {time}");
        }
        assert_eq!(between(&[], 1), None);
    }
}
