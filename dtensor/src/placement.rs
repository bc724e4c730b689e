//! How a global tensor lies on the axes of the mesh inside a block.

use catalog::Axis;

/// Placement on one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Every rank holds the whole.
    Replicate,
    /// Ranks hold consecutive chunks of a dimension, `⌈n/k⌉` long.
    Shard(usize),
    /// A dimension made of parts, each sharded: fused QKV, fused gate and up.
    Interleaved(usize, Parts),
    /// Ranks hold terms of a sum.
    Partial,
}

impl Placement {
    /// Whether ranks hold parts of a dimension.
    #[must_use]
    pub fn shards(self, dim: usize) -> bool {
        matches!(self, Self::Shard(d) | Self::Interleaved(d, _) if d == dim)
    }
}

/// Relative sizes of up to three parts of a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Parts([u64; 3]);

impl Parts {
    /// Gate and up projections.
    pub const HALVES: Self = Self([1, 1, 0]);

    /// Queries, keys and values: `group` query heads to each key head.
    #[must_use]
    pub fn qkv(group: u64) -> Self {
        Self([group, 1, 1])
    }

    /// The ranges of the parts of `n` elements.
    pub fn ranges(self, n: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let whole = self.0.iter().sum::<u64>() as usize;
        let mut end = 0;
        self.0.into_iter().filter(|&p| p > 0).map(move |part| {
            let start = end;
            end += n * part as usize / whole;
            start..end
        })
    }
}

impl std::fmt::Display for Parts {
    /// The number of equal parts, or their relative sizes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self
            .0
            .iter()
            .filter(|&&p| p > 0)
            .map(u64::to_string)
            .collect();
        if self.0.iter().all(|&p| p < 2) {
            write!(f, "{}", parts.len())
        } else {
            f.write_str(&parts.join(":"))
        }
    }
}

/// Axes that communicate inside a block, in the order of [`Placements`].
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

/// Sizes of the axes inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockMesh {
    /// Tensor parallel.
    pub tp: u64,
    /// Context parallel.
    pub cp: u64,
    /// Expert parallel.
    pub ep: u64,
    /// Expert tensor parallel.
    pub etp: u64,
}

impl BlockMesh {
    /// Ranks on an axis; 1 for axes that do not communicate inside a block.
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
    /// Whole on every rank.
    pub const REPLICATE: Self = Self([Placement::Replicate; 4]);

    /// Placement on an axis.
    #[must_use]
    pub fn on(&self, axis: Axis) -> Placement {
        BLOCK_AXES
            .iter()
            .position(|&a| a == axis)
            .map_or(Placement::Replicate, |i| self.0[i])
    }

    /// The same with another placement on one axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, placement: Placement) -> Self {
        if let Some(index) = BLOCK_AXES.iter().position(|&a| a == axis) {
            self.0[index] = placement;
        }
        self
    }

    /// The same with every interleaved dim a plain shard: where one of its parts lies.
    #[must_use]
    pub fn of_a_part(mut self) -> Self {
        for placement in &mut self.0 {
            if let Placement::Interleaved(dim, _) = *placement {
                *placement = Placement::Shard(dim);
            }
        }
        self
    }

    /// Local shape of a global shape: the largest rank's.
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

/// Elements of a sharded dimension that stay together: exact mode sums over blocks of these.
pub const FEATURE_LEAF: u64 = 8;

/// Elements that a rank holds, at most, when `n` are sharded over `size` ranks: equal shares where they
/// divide, else `⌈⌈n/leaf⌉/size⌉` leaves, so that no leaf is split; the last ranks hold fewer or none.
#[must_use]
pub fn chunk_size(n: u64, size: u64) -> u64 {
    if n.is_multiple_of(size) {
        n / size
    } else {
        n.div_ceil(FEATURE_LEAF).div_ceil(size) * FEATURE_LEAF
    }
}

/// Elements of rank `rank` of `size` when `n` elements are sharded: `max(min(n, c(r+1)) − c·r, 0)`
/// with `c` their [`chunk_size`].
#[must_use]
pub fn shard_size(n: u64, size: u64, rank: u64) -> u64 {
    let chunk = chunk_size(n, size);
    n.min(chunk * (rank + 1)).saturating_sub(chunk * rank)
}
