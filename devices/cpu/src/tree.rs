//! The canonical reduction tree of exact mode.
//!
//! A sum that a sharding can split is evaluated over one binary tree whose leaves are fixed blocks of the global index.
//! Each rank reduces the leaves that it holds to the largest nodes they cover; sibling nodes merge, left plus right, as
//! soon as one rank has both. Absent nodes are skipped. So the root has the same bits under every layout.

use std::collections::BTreeMap;
use std::ops::Range;

use super::math::add;

pub use dtensor::placement::FEATURE_LEAF;

/// Tokens of a sequence per leaf.
pub const TOKEN_LEAF: u64 = 4;

/// The nodes of one tree that this rank knows: `(level, index)` covers leaves `index · 2^level .. (index + 1) ·
/// 2^level`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TreeSum {
    nodes: BTreeMap<(u32, u64), Vec<f32>>,
}

impl TreeSum {
    /// Adds a node, and merges it with its sibling for as long as the sibling is known.
    pub fn insert(&mut self, mut level: u32, mut index: u64, mut value: Vec<f32>) {
        while let Some(sibling) = self.nodes.remove(&(level, index ^ 1)) {
            value = if index & 1 == 0 {
                merged(value, &sibling)
            } else {
                merged(sibling, &value)
            };
            level += 1;
            index >>= 1;
        }
        self.nodes.insert((level, index), value);
    }

    /// Adds a leaf.
    pub fn leaf(&mut self, index: u64, value: Vec<f32>) {
        self.insert(0, index, value);
    }

    /// A sum of leaves of so many numbers, each of which starts at zero and `sum` adds to; the range is the leaf's.
    pub(crate) fn of(
        leaves: &[(u64, Range<usize>)],
        numbers: usize,
        sum: impl Fn(Range<usize>, &mut [f32]),
    ) -> Self {
        let mut tree = Self::default();
        for (leaf, range) in leaves {
            let mut node = vec![0.0; numbers];
            sum(range.clone(), &mut node);
            tree.leaf(*leaf, node);
        }
        tree
    }

    /// Adds all nodes of another sum.
    pub fn merge(&mut self, other: Self) {
        for ((level, index), value) in other.nodes {
            self.insert(level, index, value);
        }
    }

    /// The root, with absent nodes skipped; `None` when there are no leaves.
    #[must_use]
    pub fn root(self) -> Option<Vec<f32>> {
        let mut levels = self.nodes;
        loop {
            let (level, index) = *levels.keys().next()?;
            let value = levels.remove(&(level, index))?;
            if levels.is_empty() {
                return Some(value);
            }
            // The lowest level is visited left to right, so a right sibling is still here.
            let value = match levels.remove(&(level, index ^ 1)) {
                Some(right) => merged(value, &right),
                None => value,
            };
            match levels.remove(&(level + 1, index >> 1)) {
                // A parent is known beside its child: two ranks held the same leaves. This cannot
                // happen for leaves that are inserted once.
                Some(other) => levels.insert((level + 1, index >> 1), merged(value, &other)),
                None => levels.insert((level + 1, index >> 1), value),
            };
        }
    }

    /// Applies a function to every node's value; it must act elementwise, such as a slice.
    #[must_use]
    pub fn map(self, change: impl Fn(Vec<f32>) -> Vec<f32>) -> Self {
        let nodes = self
            .nodes
            .into_iter()
            .map(|(key, value)| (key, change(value)))
            .collect();
        Self { nodes }
    }

    /// Serialises the nodes.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend((self.nodes.len() as u64).to_le_bytes());
        for ((level, index), value) in &self.nodes {
            out.extend(level.to_le_bytes());
            out.extend(index.to_le_bytes());
            out.extend((value.len() as u64).to_le_bytes());
            out.extend_from_slice(bytemuck::cast_slice(value));
        }
    }

    /// Reads what [`TreeSum::write`] wrote into this one; returns the rest of the bytes.
    pub fn read<'b>(&mut self, mut bytes: &'b [u8]) -> &'b [u8] {
        let count = word(&mut bytes);
        for _ in 0..count {
            let (level, rest) = bytes.split_at(4);
            let level = u32::from_le_bytes(level.try_into().expect("four bytes"));
            bytes = rest;
            let index = word(&mut bytes);
            let length = word(&mut bytes) as usize;
            let (value, rest) = bytes.split_at(4 * length);
            self.insert(level, index, bytemuck::pod_collect_to_vec(value));
            bytes = rest;
        }
        bytes
    }
}

/// Takes a little-endian 64-bit word from the front.
pub(crate) fn word(bytes: &mut &[u8]) -> u64 {
    let (first, rest) = bytes.split_at(8);
    *bytes = rest;
    u64::from_le_bytes(first.try_into().expect("eight bytes"))
}

fn merged(mut left: Vec<f32>, right: &[f32]) -> Vec<f32> {
    add(&mut left, right);
    left
}

/// The leaves (blocks of `leaf` elements of a dim of size `whole`) that a rank's `indices` cover:
/// the number of each leaf and the local range of its elements.
///
/// # Errors
/// If the rank holds only part of a leaf: the index at which that part ends, or begins if it is the leaf's last part.
pub fn leaves(indices: &[u64], whole: u64, leaf: u64) -> Result<Vec<(u64, Range<usize>)>, u64> {
    let mut found: Vec<(u64, Range<usize>)> = Vec::new();
    for (at, &index) in indices.iter().enumerate() {
        match found.last_mut() {
            Some((number, range)) if *number == index / leaf && range.end == at => {
                range.end = at + 1;
            }
            _ => found.push((index / leaf, at..at + 1)),
        }
    }
    for (number, range) in &found {
        let full = leaf.min(whole - number * leaf);
        if range.len() as u64 != full {
            let (first, last) = (indices[range.start], indices[range.end - 1]);
            return Err(if first == number * leaf {
                last + 1
            } else {
                first
            });
        }
    }
    Ok(found)
}

/// Like [`leaves`] for ascending indices with gaps, such as an expert's tokens; leaves may be
/// incomplete.
pub(super) fn parts_of_leaves(indices: &[u64], leaf: u64) -> Vec<(u64, Range<usize>)> {
    let mut found: Vec<(u64, Range<usize>)> = Vec::new();
    for (at, &index) in indices.iter().enumerate() {
        match found.last_mut() {
            Some((number, range)) if *number == index / leaf => range.end = at + 1,
            _ => found.push((index / leaf, at..at + 1)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_way_of_sharing_leaves_gives_the_same_bits(
            values in prop::collection::vec(prop::option::of(-1e3f32..1e3), 1..70),
            owners in prop::collection::vec(0usize..5, 70),
        ) {
            let mut single = TreeSum::default();
            let mut ranks = vec![TreeSum::default(); 5];
            for (i, value) in values.iter().enumerate() {
                if let Some(value) = value {
                    single.leaf(i as u64, vec![*value]);
                    ranks[owners[i]].leaf(i as u64, vec![*value]);
                }
            }
            let mut together = TreeSum::default();
            for rank in ranks.iter().rev() {
                let mut bytes = Vec::new();
                rank.write(&mut bytes);
                let rest = together.read(&bytes);
                prop_assert!(rest.is_empty());
            }
            let bits = |sum: TreeSum| sum.root().map(|v| v[0].to_bits());
            prop_assert_eq!(bits(single), bits(together));
        }
    }
}
