//! Buckets: runs of gradients that are reduced in one message.

use std::ops::Range;

use catalog::Bytes;

use super::device::Device;
use super::slot::{Kind, Slot};

/// A run of slots of one partition whose gradients are reduced in one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pub(super) partition: usize,
    /// The elements of the partition that it covers.
    pub(super) range: Range<usize>,
    /// The block after whose backward its gradients are complete.
    pub(super) block: usize,
}

/// A bucket whose reduction is under way.
#[derive(Debug)]
pub(super) struct Moving<D: Device> {
    pub(super) bucket: Bucket,
    /// The reduce-scatter under way; `None` when no other rank has terms of it.
    pub(super) terms: Option<D::Moving>,
}

/// Groups gradients into buckets of at least `size` bytes but for the last, from the last block on.
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
