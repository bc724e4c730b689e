//! How a global tensor is distributed over the mesh axes inside a block.

use catalog::Axis;

/// Placement on one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Every rank holds the whole tensor.
    Replicate,
    /// Ranks hold consecutive chunks of a dimension, [`chunk_size`] elements long.
    Shard(usize),
    /// Like `Shard`, of a dimension made of several parts, each sharded separately: fused QKV, fused gate and up.
    Interleaved(usize, Parts),
    /// Every rank holds a term of a sum.
    Partial,
}

impl Placement {
    /// Whether `dim` is sharded.
    #[must_use]
    pub fn shards(self, dim: usize) -> bool {
        matches!(self, Self::Shard(d) | Self::Interleaved(d, _) if d == dim)
    }
}

/// Relative sizes of the parts of a dimension; unused places are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Parts([u32; MOST_PARTS]);

/// Most parts of a dimension: Mamba-2's gate, input, B, C and step.
const MOST_PARTS: usize = 5;

impl Parts {
    /// Two equal parts: gate and up projections.
    pub const HALVES: Self = Self([1, 1, 0, 0, 0]);

    /// Queries, keys and values: `group` query heads to each key head.
    #[must_use]
    pub fn qkv(group: u64) -> Self {
        Self::of([group, 1, 1])
    }

    /// Parts of these relative sizes.
    #[must_use]
    pub fn of<const N: usize>(sizes: [u64; N]) -> Self {
        const { assert!(N <= MOST_PARTS) };
        let mut parts = [0; MOST_PARTS];
        for (part, size) in parts.iter_mut().zip(sizes) {
            *part = u32::try_from(size).unwrap_or(u32::MAX);
        }
        Self(parts)
    }

    /// The parts that are wholly within these columns of a dimension of `whole`.
    fn within(self, columns: std::ops::Range<u64>, whole: u64) -> Self {
        let ranges: Vec<_> = self.ranges(whole as usize).collect();
        let inside = |range: &std::ops::Range<usize>| {
            columns.start <= range.start as u64 && range.end as u64 <= columns.end
        };
        let mut parts = [0; MOST_PARTS];
        let found = ranges.iter().zip(self.0).filter(|(range, _)| inside(range));
        for (place, (_, size)) in parts.iter_mut().zip(found) {
            *place = size;
        }
        Self(parts)
    }

    /// The ranges that the parts take up in a dimension of `n` elements.
    pub fn ranges(self, n: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let whole = self.0.iter().map(|&part| part as usize).sum::<usize>();
        let mut end = 0;
        self.0.into_iter().filter(|&p| p > 0).map(move |part| {
            let start = end;
            end += n * part as usize / whole;
            start..end
        })
    }
}

impl std::fmt::Display for Parts {
    /// Writes the number of equal parts, or their relative sizes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self
            .0
            .iter()
            .filter(|&&p| p > 0)
            .map(u32::to_string)
            .collect();
        if self.0.iter().all(|&p| p < 2) {
            write!(f, "{}", parts.len())
        } else {
            f.write_str(&parts.join(":"))
        }
    }
}

/// The mesh axes that communicate inside a block, in the order of [`Placements`].
pub const BLOCK_AXES: [Axis; 4] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Etp];

/// Placement on every axis of [`BLOCK_AXES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placements(pub [Placement; 4]);

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Replicate => f.write_str("Replicate"),
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Interleaved(dim, parts) => write!(f, "Interleaved({dim}, {parts})"),
            Self::Partial => f.write_str("Partial"),
        }
    }
}

impl std::fmt::Display for Placements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let placed = BLOCK_AXES.iter().zip(&self.0);
        for (index, (axis, placement)) in placed.enumerate() {
            let gap = if index > 0 { ", " } else { "" };
            write!(f, "{gap}{}: {placement}", axis.name())?;
        }
        Ok(())
    }
}

/// Sizes of the mesh axes inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockMesh {
    /// Tensor-parallel ranks.
    pub tp: u64,
    /// Context-parallel ranks.
    pub cp: u64,
    /// Expert-parallel ranks.
    pub ep: u64,
    /// Expert-tensor-parallel ranks.
    pub etp: u64,
}

impl BlockMesh {
    /// Number of ranks on an axis; 1 for axes that do not communicate inside a block.
    #[must_use]
    pub fn size(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Tp => self.tp,
            Axis::Cp => self.cp,
            Axis::Ep => self.ep,
            Axis::Etp => self.etp,
            Axis::Edp | Axis::DpShard | Axis::DpReplicate | Axis::Pp => 1,
        }
    }
}

impl Placements {
    /// Replicated on every axis.
    pub const REPLICATE: Self = Self([Placement::Replicate; 4]);

    /// The placement on an axis; `Replicate` for axes not in [`BLOCK_AXES`].
    #[must_use]
    pub fn on(&self, axis: Axis) -> Placement {
        BLOCK_AXES
            .iter()
            .position(|&a| a == axis)
            .map_or(Placement::Replicate, |i| self.0[i])
    }

    /// These placements with the one on `axis` replaced.
    #[must_use]
    pub fn with(mut self, axis: Axis, placement: Placement) -> Self {
        if let Some(index) = BLOCK_AXES.iter().position(|&a| a == axis) {
            self.0[index] = placement;
        }
        self
    }

    /// Placements of the slice `columns` of the last dim of `whole` columns. If an interleaved dim
    /// keeps several parts, it is interleaved over these; if one part, it is a plain shard.
    #[must_use]
    pub(crate) fn of_columns(mut self, columns: std::ops::Range<u64>, whole: u64) -> Self {
        for placement in &mut self.0 {
            if let Placement::Interleaved(dim, parts) = *placement {
                let within = parts.within(columns.clone(), whole);
                *placement = match within.0[1] {
                    0 => Placement::Shard(dim),
                    _ => Placement::Interleaved(dim, within),
                };
            }
        }
        self
    }

    /// These placements with every interleaved dim a plain shard: the placements of one of its parts.
    #[must_use]
    pub fn of_a_part(mut self) -> Self {
        for placement in &mut self.0 {
            if let Placement::Interleaved(dim, _) = *placement {
                *placement = Placement::Shard(dim);
            }
        }
        self
    }

    /// Local shape of a tensor of this global shape, on the rank with the largest shards.
    #[must_use]
    pub fn local(&self, shape: &[u64], mesh: &BlockMesh) -> Vec<u64> {
        let mut local = shape.to_vec();
        for (axis, placement) in BLOCK_AXES.iter().zip(self.0) {
            match placement {
                Placement::Shard(dim) | Placement::Interleaved(dim, _) => {
                    local[dim] = chunk_size(local[dim], mesh.size(*axis));
                }
                Placement::Replicate | Placement::Partial => {}
            }
        }
        local
    }
}

/// Elements of a leaf, a block of a sharded dimension. Exact mode sums leaf by leaf, so that no
/// sharding changes the order, and refuses a sharding that splits a leaf.
pub const FEATURE_LEAF: u64 = 8;

/// The most elements that a rank holds when `n` are sharded over `size` ranks: equal shares where they divide, else
/// `⌈⌈n/leaf⌉/size⌉` leaves, so that no leaf is split; the last ranks then hold fewer or none.
#[must_use]
pub fn chunk_size(n: u64, size: u64) -> u64 {
    if n.is_multiple_of(size) {
        n / size
    } else {
        n.div_ceil(FEATURE_LEAF).div_ceil(size) * FEATURE_LEAF
    }
}

/// Elements that rank `rank` of `size` holds when `n` are sharded: `max(min(n, c(r+1)) − c·r, 0)` with `c` their
/// [`chunk_size`].
#[must_use]
pub fn shard_size(n: u64, size: u64, rank: u64) -> u64 {
    let chunk = chunk_size(n, size);
    n.min(chunk * (rank + 1)).saturating_sub(chunk * rank)
}
