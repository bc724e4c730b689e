//! Algorithms of collectives that cross scale-up domains, and their times.

use catalog::tables::CollectiveOp;
use catalog::{Algorithm, Seconds};

use crate::known;

/// A collective that crosses scale-up domains.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crossing {
    pub(super) op: CollectiveOp,
    /// Size in bytes, by the convention of nccl-tests.
    pub(super) bytes: f64,
    pub(super) ranks: u64,
    /// Number of its ranks in each domain.
    pub(super) together: u64,
    /// Seconds for which the busiest link is in use.
    pub(super) moved: f64,
    /// Seconds for which the links inside domains are in use.
    pub(super) inside: f64,
    /// Rate of all network cards of the ranks of a domain, bytes per second.
    pub(super) cards: f64,
    /// Latency of a step between domains beyond that of the collective library, in seconds.
    pub(super) far_latency: f64,
    /// Rate of one network card, bytes per second.
    pub(super) far: f64,
    /// Rate of a rank's links inside its domain, bytes per second.
    pub(super) inside_rate: f64,
}

impl Crossing {
    /// Time by an algorithm; `None` if it does not support this operation.
    pub(super) fn time(&self, algorithm: Algorithm) -> Option<Seconds> {
        match algorithm {
            Algorithm::Ring => self.ring(),
            Algorithm::Tree => self.tree(),
            Algorithm::Pairwise => self.pairwise(),
            Algorithm::Pat => self.pat(),
        }
        .map(Seconds)
    }

    fn ring(&self) -> Option<f64> {
        let rounds = match self.op {
            CollectiveOp::AllReduce => 2.0,
            CollectiveOp::AllGather | CollectiveOp::ReduceScatter => 1.0,
            CollectiveOp::AllToAll => return None,
        };
        let steps = (self.ranks - 1) as f64;
        let latency = steps * known::RING_STEP.factor() + self.crossings() * self.far_latency;
        let long = rounds * latency + self.moved;
        Some(long.min(self.short_ring()))
    }

    /// Number of steps of a ring in which a part of the data goes to another domain.
    fn crossings(&self) -> f64 {
        (self.ranks.div_ceil(self.together)).min(self.ranks - 1) as f64
    }

    /// Time of a ring by NCCL's protocol for short messages, LL: every 4 bytes carry a flag of 4, so that steps need no
    /// synchronisation, but links carry at most half as much, and not more than a rate of the protocol's own
    /// (NVIDIA/nccl@5067397, `src/graph/tuning.cc`). NCCL takes the protocol that it expects to be faster.
    fn short_ring(&self) -> f64 {
        let rounds = match self.op {
            CollectiveOp::AllReduce => 2.0,
            _ => 1.0,
        };
        let steps = (self.ranks - 1) as f64;
        let crossings = (self.ranks.div_ceil(self.together) - 1) as f64;
        let crossing = known::SHORT_RING_CROSSING.factor() + self.far_latency;
        let inside = (steps - crossings) * known::SHORT_RING_STEP.factor();
        let sent = rounds * self.bytes * steps / self.ranks as f64;
        let traffic = known::SHORT_RING_TRAFFIC.factor() * (sent / 1e6);
        let latency = known::SHORT_RING_START.factor() + rounds * (inside + crossings * crossing);
        latency + traffic.max(2.0 * self.moved)
    }

    fn tree(&self) -> Option<f64> {
        if self.op != CollectiveOp::AllReduce {
            return None;
        }
        let nodes = self.ranks.div_ceil(self.together).max(2);
        let level = known::TREE_LEVEL.factor() + self.far_latency;
        let ramp = known::TREE_RAMP.factor() * (self.bytes / 1e6).sqrt();
        Some(
            2.0 * levels(nodes) * level
                + ramp
                + self.moved_by_tree() * known::TREE_TRAFFIC.factor(),
        )
    }

    /// Seconds for which a tree uses the busiest link. Between two nodes each byte goes there once and comes back once, in opposite
    /// directions of a card; a ring sends it nearly twice (NVIDIA/nccl-tests issues 22 and 196: 1 GB between two nodes takes half as long
    /// by tree as by ring).
    fn moved_by_tree(&self) -> f64 {
        let two_nodes = self.together > 1 && self.ranks.div_ceil(self.together) == 2;
        match two_nodes {
            true => self.inside.max(self.bytes / self.cards),
            false => self.moved,
        }
    }

    /// Direct sends between all pairs; the part for other domains leaves each rank by its own network card.
    fn pairwise(&self) -> Option<f64> {
        if self.op != CollectiveOp::AllToAll {
            return None;
        }
        let share = self.bytes / self.ranks as f64;
        let far = share * (self.ranks - self.together) as f64
            / (self.far * known::EXCHANGE_SHARE.factor());
        let near = if self.together > 1 {
            share * (self.together - 1) as f64 / self.inside_rate
        } else {
            0.0
        };
        let start = known::EXCHANGE_START.factor()
            + known::EXCHANGE_PEER.factor() * self.ranks as f64
            + self.far_latency;
        Some(start + far.max(near))
    }

    /// Parallel aggregated trees: a step costs what one of a ring does, and the number of steps is
    /// log₂ of the number of ranks, rounded up (NCCL 2.23 release notes, for one rank per node).
    fn pat(&self) -> Option<f64> {
        let scatters = matches!(
            self.op,
            CollectiveOp::AllGather | CollectiveOp::ReduceScatter
        );
        (scatters && self.together == 1).then(|| {
            levels(self.ranks) * (known::RING_STEP.factor() + self.far_latency) + self.moved
        })
    }
}

/// Number of levels of a binary tree with this many leaves: log₂, rounded up.
fn levels(leaves: u64) -> f64 {
    f64::from(u64::BITS - leaves.saturating_sub(1).leading_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: [CollectiveOp; 4] = [
        CollectiveOp::AllReduce,
        CollectiveOp::AllGather,
        CollectiveOp::ReduceScatter,
        CollectiveOp::AllToAll,
    ];

    fn crossing(op: CollectiveOp, ranks: u64, together: u64) -> Crossing {
        Crossing {
            op,
            bytes: 1e9,
            ranks,
            together,
            moved: 1e-3,
            inside: 1e-4,
            cards: 4e11,
            far_latency: 1e-6,
            far: 5e10,
            inside_rate: 3e11,
        }
    }

    #[test]
    fn every_operation_has_a_measured_algorithm() {
        for op in OPS {
            let times = Algorithm::MEASURED.map(|a| crossing(op, 64, 8).time(a));
            assert!(times.iter().any(Option::is_some), "{op:?}");
        }
    }

    /// 64 ranks in 8 nodes: 56 steps inside nodes and 7 between them, of 1 and 3.7 µs after a start of 6.6 µs, and 20 GB/s. Long
    /// messages take the steps of the protocol that they are sent by, 4.5 µs each.
    #[test]
    fn short_messages_go_around_a_ring_by_a_protocol_of_their_own() {
        let time = |bytes: f64, moved: f64| {
            let of = crossing(CollectiveOp::AllGather, 64, 8);
            Crossing { bytes, moved, ..of }.time(Algorithm::Ring)
        };
        let [short, long] = [time(65536.0, 2e-7), time(1e9, 2.5e-3)].map(|t| t.expect("a ring").0);
        let by_hand = 6.6e-6 + 56e-6 + 7.0 * 3.7e-6 + 65536.0 / 20e9 * 63.0 / 64.0;
        assert!((short / by_hand - 1.0).abs() < 1e-9, "{short}, {by_hand}");
        let by_hand = 63.0 * 4.5e-6 + 8.0 * 1e-6 + 2.5e-3;
        assert!((long / by_hand - 1.0).abs() < 1e-9, "{long}, {by_hand}");
    }

    #[test]
    fn a_tree_sends_each_byte_once_between_two_nodes() {
        // For two nodes 1 GB at the 400 GB/s of their cards, for three what a ring moves.
        for (ranks, traffic) in [(16, 2.5e-3), (24, 1e-3)] {
            let of = crossing(CollectiveOp::AllReduce, ranks, 8);
            let start = Crossing {
                bytes: 0.0,
                moved: 0.0,
                inside: 0.0,
                ..of
            }
            .time(Algorithm::Tree);
            let ramp = known::TREE_RAMP.factor() * 1e3_f64.sqrt();
            let found =
                of.time(Algorithm::Tree).expect("a tree").0 - start.expect("a tree").0 - ramp;
            let expected = traffic * known::TREE_TRAFFIC.factor();
            assert!((found / expected - 1.0).abs() < 1e-9, "{ranks}: {found}");
        }
    }

    #[test]
    fn aggregated_trees_take_fewer_steps_than_a_ring() {
        for (ranks, together, steps) in [(2, 1, Some(1.0)), (64, 1, Some(6.0)), (64, 8, None)] {
            let of = crossing(CollectiveOp::ReduceScatter, ranks, together);
            let expected =
                steps.map(|steps: f64| Seconds(steps * (known::RING_STEP.factor() + 1e-6) + 1e-3));
            assert_eq!(of.time(Algorithm::Pat), expected);
            assert!(of.time(Algorithm::Ring) >= expected);
        }
        let reduce = crossing(CollectiveOp::AllReduce, 64, 1);
        assert_eq!(reduce.time(Algorithm::Pat), None);
    }
}
