//! The places of all ranks on the dense and the expert mesh, and their groups of peers.

use comm::Group;
use dtensor::{BlockMesh, BlockPosition};
use plans::Strategy;
use plans::place::Place;

/// The places of all ranks of a strategy.
#[derive(Clone, Debug)]
pub struct Mesh {
    strategy: Strategy,
    places: Vec<Place>,
}

impl Mesh {
    /// The mesh of a strategy.
    #[must_use]
    pub fn new(strategy: &Strategy) -> Self {
        let places = (0..strategy.world())
            .map(|rank| Place::of(strategy, rank))
            .collect();
        Self {
            strategy: strategy.clone(),
            places,
        }
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.places.len()
    }

    /// The place of a rank.
    #[must_use]
    pub fn place(&self, rank: usize) -> Place {
        self.places[rank]
    }

    /// The group of ranks with the same `key` as `rank`, in rank order.
    #[must_use]
    pub fn group<K: PartialEq>(
        &self,
        rank: usize,
        channel: u64,
        key: impl Fn(&Place) -> K,
    ) -> Group {
        let own = key(&self.places[rank]);
        let ranks: Vec<usize> = self
            .places
            .iter()
            .filter(|p| key(p) == own)
            .map(|p| p.rank)
            .collect();
        let index = ranks.iter().position(|&r| r == rank).unwrap_or(0);
        Group {
            ranks,
            index,
            channel,
        }
    }

    /// A rank's groups on the axes inside a block, in the order of [`dtensor::BLOCK_AXES`].
    #[must_use]
    pub fn block_groups(&self, rank: usize) -> [Group; 4] {
        let dense = |p: &Place| (p.pp, p.dp_replicate, p.dp_shard);
        [
            self.group(rank, 1, |p| (dense(p), p.cp)),
            self.group(rank, 2, |p| (dense(p), p.tp)),
            self.group(rank, 3, |p| (p.pp, p.etp, p.edp)),
            self.group(rank, 4, |p| (p.pp, p.ep, p.edp)),
        ]
    }

    /// A rank's position on the axes inside a block.
    #[must_use]
    pub fn block_position(&self, rank: usize) -> BlockPosition {
        let place = self.places[rank];
        let s = &self.strategy;
        BlockPosition {
            mesh: BlockMesh {
                tp: s.tp,
                cp: s.cp,
                ep: s.ep,
                etp: s.etp,
            },
            at: [place.tp, place.cp, place.ep, place.etp],
        }
    }

    /// The rank on pipeline rank `pp` whose place is otherwise the same.
    #[must_use]
    pub fn peer(&self, rank: usize, pp: u64) -> usize {
        let own = self.places[rank];
        let same = |p: &&Place| {
            (p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp)
                == (pp, own.dp_replicate, own.dp_shard, own.cp, own.tp)
        };
        self.places.iter().find(same).map_or(rank, |p| p.rank)
    }

    /// Number of ranks that shard the states of one expert shard within one replica.
    #[must_use]
    pub fn expert_shard_size(&self) -> u64 {
        let s = &self.strategy;
        (s.edp() / s.dp_replicate).max(1)
    }
}
