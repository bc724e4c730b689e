//! Which global elements a rank holds.

use std::ops::Range;

use catalog::Axis;

use crate::placement::{BLOCK_AXES, BlockMesh, Placement, Placements, chunk_size};
use crate::tensor::TensorInfo;

/// A rank's coordinates on the mesh axes inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPosition {
    /// Sizes of the axes.
    pub mesh: BlockMesh,
    /// Index on each of [`BLOCK_AXES`].
    pub at: [u64; 4],
}

impl BlockPosition {
    /// The position in a mesh of one rank.
    pub const SINGLE: Self = Self {
        mesh: BlockMesh {
            tp: 1,
            cp: 1,
            ep: 1,
            etp: 1,
        },
        at: [0; 4],
    };

    /// This rank's index on an axis; 0 for axes not in [`BLOCK_AXES`].
    #[must_use]
    pub fn index(&self, axis: Axis) -> u64 {
        BLOCK_AXES
            .iter()
            .position(|&a| a == axis)
            .map_or(0, |i| self.at[i])
    }

    /// The position that differs only in its index on one axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, index: u64) -> Self {
        if let Some(i) = BLOCK_AXES.iter().position(|&a| a == axis) {
            self.at[i] = index;
        }
        self
    }

    /// Global indices along `dim` that this rank holds, in local order.
    ///
    /// A sequence is shared out over context-parallel ranks first, in pairs of chunks from both
    /// ends (zig-zag: causal attention costs every rank the same), then over tensor-parallel ranks
    /// in chunks of what is left; other dims go to tensor-parallel ranks first.
    #[must_use]
    pub fn indices(&self, global: &[u64], placements: &Placements, dim: usize) -> Vec<u64> {
        let sequence = is_sequence(global.len(), dim);
        let order = if sequence {
            [Axis::Cp, Axis::Tp, Axis::Ep, Axis::Etp]
        } else {
            BLOCK_AXES
        };
        let mut indices: Vec<u64> = (0..global[dim]).collect();
        for axis in order {
            let (size, at) = (self.mesh.size(axis), self.index(axis));
            if size == 1 {
                continue;
            }
            indices = match placements.on(axis) {
                Placement::Shard(d) if d == dim && sequence && axis == Axis::Cp => {
                    let pairs = chunk(&indices, 2 * size, at);
                    [pairs, chunk(&indices, 2 * size, 2 * size - 1 - at)].concat()
                }
                Placement::Shard(d) if d == dim => chunk(&indices, size, at).to_vec(),
                Placement::Interleaved(d, parts) if d == dim => parts
                    .ranges(indices.len())
                    .flat_map(|part| chunk(&indices[part], size, at).to_vec())
                    .collect(),
                _ => indices,
            };
        }
        indices
    }

    /// For a parameter with one number per head: the range of its local numbers that belongs to the local heads of
    /// attention's scores `[batch, heads, query, key]`. They differ when context parallelism by all-to-all shards the
    /// heads.
    #[must_use]
    pub fn numbers_of_heads(&self, parameter: &TensorInfo, scores: &TensorInfo) -> Range<usize> {
        let of = |info: &TensorInfo, dim| self.indices(&info.global, &info.placements, dim);
        let (held, here) = (of(parameter, 0), of(scores, 1));
        let first = held.iter().position(|head| here.first() == Some(head));
        first.map_or(0..0, |first| first..first + here.len())
    }

    /// Global indices of the elements that this rank holds, for every dim of a tensor.
    #[must_use]
    pub fn all_indices(&self, global: &[u64], placements: &Placements) -> Vec<Vec<u64>> {
        (0..global.len())
            .map(|dim| self.indices(global, placements, dim))
            .collect()
    }
}

/// Whether `dim` is the sequence: dim 1 of `[batch, sequence, …]`, dim 2 of attention's `[batch, heads, query, key]`.
pub(crate) fn is_sequence(dims: usize, dim: usize) -> bool {
    dim == if dims == 4 { 2 } else { 1 } && dims > 1
}

/// The chunk at `index` of `indices` cut into `size` chunks; the last may be shorter or empty.
fn chunk(indices: &[u64], size: u64, index: u64) -> &[u64] {
    let length = chunk_size(indices.len() as u64, size) as usize;
    let start = (length * index as usize).min(indices.len());
    &indices[start..(start + length).min(indices.len())]
}

/// Splits positions into maximal ranges whose indices are consecutive numbers.
#[must_use]
pub fn consecutive(indices: &[u64]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, &index) in indices.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if indices[run.end - 1] + 1 == index => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}
