//! Runs of gradients that travel together.

use std::ops::Range;

use catalog::Bytes;

use super::device::Device;
use super::slot::{Kind, Slot};

/// A run of slots of one partition whose gradients travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pub(super) partition: usize,
    /// Elements of the partition.
    pub(super) range: Range<usize>,
    /// Backward ends with this block for them.
    pub(super) block: usize,
}

/// A bucket on its way.
#[derive(Debug)]
pub(super) struct Moving<D: Device> {
    pub(super) bucket: Bucket,
    /// Everyone's terms of this rank's part of it; none when nobody else has any.
    pub(super) terms: Option<D::Moving>,
}

/// Buckets of at least `size`, from the last block, whose gradients are there first, to the first.
pub(super) fn buckets(slots: &[Slot], size: Bytes) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    for kind in [Kind::Dense, Kind::Expert] {
        let mut open: Option<Bucket> = None;
        for slot in slots.iter().filter(|s| s.kind == kind).rev() {
            let first = slot.uses.iter().map(|&(block, _)| block).min();
            let block = first.expect("a slot is used");
            let here = slot.offset..slot.offset + slot.len;
            let bucket = open.get_or_insert(Bucket {
                partition: kind as usize,
                range: here.clone(),
                block,
            });
            bucket.range.start = here.start;
            bucket.block = block;
            if 4 * bucket.range.len() as u64 >= size.0 {
                buckets.extend(open.take());
            }
        }
        buckets.extend(open);
    }
    buckets
}
