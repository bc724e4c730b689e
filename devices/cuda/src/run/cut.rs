//! The part of a tensor that a rank holds, as ranges along its dims.

use std::ops::Range;

use catalog::Axis;
use dtensor::TensorInfo;
use dtensor::layout::consecutive;
use dtensor::placement::{Placement, Placements};

/// Ranges of indices along one dim.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(super) dim: usize,
    pub(super) runs: Vec<Range<usize>>,
}

/// Everything that a [`Cut`] depends on; its key in the cache.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CutOf {
    global: Vec<u64>,
    placements: [Placements; 2],
    /// The axis whose ranks share the tensor; `None` for this rank's part alone.
    axis: Option<Axis>,
}

/// For each rank on an axis, its part of a tensor that this rank holds: ranges along the dims that are cut.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cut {
    pub(super) members: Vec<Vec<Piece>>,
}

impl CutOf {
    /// Cuts a tensor that is whole on `axis` into shards there: one part for each rank.
    pub(super) fn among(info: &TensorInfo, axis: Axis, to: Placement) -> Self {
        let whole = info.placements.with(axis, Placement::Replicate);
        Self {
            global: info.global.clone(),
            placements: [whole, info.placements.with(axis, to)],
            axis: Some(axis),
        }
    }

    /// Cuts this rank's part under the placements of `to` out of what it holds under `from`.
    pub(super) fn alone(from: &TensorInfo, to: &TensorInfo) -> Self {
        Self {
            global: to.global.clone(),
            placements: [from.placements, to.placements],
            axis: None,
        }
    }
}

impl Cut {
    pub(super) fn new(host: &cpu_device::Machine<'_>, of: &CutOf) -> Self {
        let [before, after] = &of.placements;
        let here = &host.position;
        let mine = here.all_indices(&of.global, before);
        let positions = match of.axis {
            Some(axis) => (0..host.group(axis).size())
                .map(|peer| here.with(axis, peer as u64))
                .collect(),
            None => vec![*here],
        };
        let pieces = |position: &dtensor::layout::BlockPosition| {
            let theirs = position.all_indices(&of.global, after);
            let dims = mine.iter().zip(&theirs).enumerate();
            dims.filter(|(_, (mine, theirs))| mine != theirs)
                .map(|(dim, (mine, theirs))| Piece {
                    dim,
                    runs: runs(mine, theirs),
                })
                .collect()
        };
        Self {
            members: positions.iter().map(pieces).collect(),
        }
    }
}

/// Ranges of `whole` that hold the elements of `part`; both are lists of global indices.
fn runs(whole: &[u64], part: &[u64]) -> Vec<Range<usize>> {
    let places = cpu_device::places(whole, part);
    let numbers: Vec<u64> = places.iter().map(|&place| place as u64).collect();
    let run = |run: Range<usize>| places[run.start]..places[run.start] + run.len();
    consecutive(&numbers).into_iter().map(run).collect()
}

impl Piece {
    pub(super) fn len(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// Shape of this part of a tensor of a given shape.
    pub(super) fn of(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        shape[self.dim] = self.len();
        shape
    }
}
