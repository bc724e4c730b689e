//! The device mesh: named axes, their order, and where the ranks of an axis's groups lie.

/// Where one communication group lies: `size` ranks, `stride` apart in rank order.
///
/// Axes are contiguous blocks of the rank order, so a group is described by its size and the
/// distance between neighbours; with domains of `d` devices, `max(1, min(size, d / stride))`
/// of its ranks share one domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Ranks in the group.
    pub size: u64,
    /// Distance in rank order between neighbours of the group.
    pub stride: u64,
}

impl Group {
    /// Ranks of the group in one block of `block` consecutive ranks.
    #[must_use]
    pub fn ranks_per_block(self, block: u64) -> u64 {
        (block / self.stride).clamp(1, self.size)
    }
}
