//! What a pipeline sends over a link between pools, and how long the link is busy with it.
//!
//! If consecutive virtual stages are in different pools, every micro-batch crosses the link between
//! these twice: its activation forward, later its gradient back. In an interleaved schedule the
//! last rank also sends to the first. Each pair of pools has a full-duplex link of its own.

use catalog::{Bytes, Link, Seconds};
use plans::Decisions;

use crate::{Scenario, messages};

/// How often a micro-batch's activations and gradients go from one pool to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Crossings {
    /// Most transfers of one micro-batch that a single pipeline rank sends to other pools.
    sent: u64,
    /// Most transfers of one micro-batch that a link carries in one direction, from all ranks.
    carried: u64,
}

impl Crossings {
    /// Counts the transfers between pools of a pipeline, given each rank's pool.
    pub(crate) fn new(rank_of_stage: &[u32], pool_of_rank: &[usize]) -> Self {
        let pools = pool_of_rank.iter().max().map_or(0, |last| last + 1);
        let mut sent = vec![0; pool_of_rank.len()];
        let mut carried = vec![0; pools * pools];
        for pair in rank_of_stage.windows(2) {
            let [from, to] = [pair[0] as usize, pair[1] as usize];
            // The activation, then its gradient.
            for [sender, receiver] in [[from, to], [to, from]] {
                let [out, into] = [pool_of_rank[sender], pool_of_rank[receiver]];
                if out != into {
                    sent[sender] += 1;
                    carried[out * pools + into] += 1;
                }
            }
        }
        let most = |counts: Vec<u64>| counts.into_iter().max().unwrap_or_default();
        Self {
            sent: most(sent),
            carried: most(carried),
        }
    }
}

/// How long the activation of one micro-batch takes over a link between pools.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    /// Time in which all ranks of a stage put their part on the link.
    busy: Seconds,
    /// Time from one end of the link to the other.
    latency: Seconds,
}

impl Way {
    /// The way of an activation over `link`; each rank of the sending stage holds `output`.
    pub(crate) fn new(link: &Link, whole: &Scenario, d: &Decisions, output: Bytes) -> Self {
        let sent = messages::sent_to_next_stage(whole, d, output);
        // All ranks of the stage send at the same time.
        let bytes = sent.as_f64() * (d.world() / d.pp) as f64;
        Self {
            busy: Seconds(bytes / link.bandwidth.value.0),
            latency: link.latency.value,
        }
    }

    /// Time from sending the first byte until the last byte has arrived.
    pub(crate) fn transfer(&self) -> Seconds {
        self.busy + self.latency
    }

    /// The least time in which `micro_batches` cross the link: a rank sends one activation or
    /// gradient after another, and several ranks share the link.
    pub(crate) fn least(&self, crossings: Crossings, micro_batches: f64) -> Seconds {
        let sent = self.transfer() * (crossings.sent as f64 * micro_batches);
        let carried = self.busy * (crossings.carried as f64 * micro_batches) + self.latency;
        match crossings.carried {
            0 => Seconds(0.0),
            _ => sent.max(carried),
        }
    }
}

#[cfg(test)]
mod tests {
    use plans::{ScheduleKind, schedule};

    use super::*;

    #[test]
    fn wrap_around_transfers_cross_the_link_too() {
        let of = |kind, pools: &[usize], vpp| {
            let ranks = schedule::rank_of_stage(kind, pools.len() as u64, vpp);
            let Crossings { sent, carried } = Crossings::new(&ranks, pools);
            [sent, carried]
        };
        use ScheduleKind::{Interleaved, OneFOneB, ZbV};
        assert_eq!(of(OneFOneB, &[0, 0], 1), [0, 0]);
        assert_eq!(of(OneFOneB, &[0, 0, 1, 1], 1), [1, 1]);
        // The middle pool's only rank sends activations to the last pool, and gradients to the first.
        assert_eq!(of(OneFOneB, &[0, 1, 2], 1), [2, 1]);
        // Down the ranks and up again: the same two ranks are at the link.
        assert_eq!(of(ZbV, &[0, 0, 1, 1], 2), [2, 2]);
        // Three activations from rank 1 to 2, and two gradients from rank 0 to 3.
        assert_eq!(of(Interleaved, &[0, 0, 1, 1], 3), [3, 5]);
        // One rank sends all of it.
        assert_eq!(of(Interleaved, &[0, 1], 3), [5, 5]);
    }
}
