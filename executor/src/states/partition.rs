//! The flat partition that parameters of one kind lie in, and the part of it that this rank owns.

use std::ops::Range;

use catalog::{DType, Zero};
use comm::Group;

use crate::device::Device;
use crate::error::ExecutorError;
use crate::slots::{Kind, Slot};

/// Who shares the states of a kind of parameters with this rank.
#[derive(Clone, Debug)]
pub struct Sharing {
    /// Ranks that each own a shard.
    pub shard: Group,
    /// Ranks that own the same shard.
    pub replicate: Group,
    /// Both together.
    pub all: Group,
    /// Both and the tensor-parallel ranks.
    pub all_with_tp: Group,
    /// Tensor-parallel ranks.
    pub tp: Group,
    /// Whether this rank speaks for its replicas in sums over all parameters.
    pub speaks: bool,
}

/// The flat states of one kind.
pub(super) struct Partition<D: Device> {
    pub(super) kind: Kind,
    pub(super) sharing: Sharing,
    /// Elements before sharding.
    pub(super) elements: usize,
    /// Elements of the optimizer's states that this rank owns.
    pub(super) own: Range<usize>,
    pub(super) master: D::Flat,
    pub(super) momentum: D::Flat,
    pub(super) variance: D::Flat,
    /// Sums of gradients: of everything under ZeRO-0 and 1, of the own shard under 2 and 3.
    pub(super) gradient: D::Flat,
    /// Under ZeRO-3, the own shard as kernels read it.
    pub(super) shard: Option<D::Tensor>,
}

impl<D: Device> Partition<D> {
    pub(super) fn new(
        device: &D,
        (kind, sharing): (Kind, Sharing),
        slots: &[Slot],
        (zero, dtype): (Zero, DType),
        seed: u64,
    ) -> Result<Self, ExecutorError> {
        let mine = || slots.iter().filter(|s| s.kind == kind);
        let elements = mine().map(|s| s.len).sum::<usize>();
        let own = owned(elements, sharing.shard.size(), sharing.shard.index);
        let mut master = Vec::with_capacity(own.len());
        for slot in mine() {
            let Some(range) = overlap(&own, slot) else {
                continue;
            };
            master.extend(slot.initial(seed, range.start - slot.offset..range.end - slot.offset));
        }
        let gradients = if zero >= Zero::Z2 {
            own.len()
        } else {
            elements
        };
        let mut partition = Self {
            kind,
            sharing,
            elements,
            master: device.flat(master)?,
            momentum: device.zeros(own.len())?,
            variance: device.zeros(own.len())?,
            gradient: device.zeros(gradients)?,
            shard: None,
            own,
        };
        if zero == Zero::Z3 && !partition.is_whole() {
            partition.shard = Some(partition.rounded(device, dtype)?);
        }
        Ok(partition)
    }

    /// Elements that a member of the group that shards states owns.
    pub(super) fn owned(&self, rank: usize) -> Range<usize> {
        owned(self.elements, self.sharing.shard.size(), rank)
    }

    /// The own elements as kernels read them.
    pub(super) fn rounded(&self, device: &D, dtype: DType) -> Result<D::Tensor, ExecutorError> {
        let len = self.own.len();
        device.rounded(&self.master, 0..len, vec![len], dtype)
    }

    /// Whether every rank owns all elements.
    pub(super) fn is_whole(&self) -> bool {
        self.sharing.shard.size() == 1
    }

    /// Whether no other rank has gradients of its parameters.
    pub(super) fn is_alone(&self) -> bool {
        self.sharing.all.size() == 1 && self.sharing.tp.size() == 1
    }

    /// Where elements of the partition lie in the gradient.
    pub(super) fn in_gradient(&self, range: &Range<usize>) -> Range<usize> {
        let base = if D::len(&self.gradient) == self.elements {
            0
        } else {
            self.own.start
        };
        range.start - base..range.end - base
    }
}

/// Elements of a partition that the `rank`-th of so many ranks owns.
pub(super) fn owned(elements: usize, ranks: usize, rank: usize) -> Range<usize> {
    let chunk = elements.div_ceil(ranks);
    let start = (chunk * rank).min(elements);
    start..(start + chunk).min(elements)
}

/// What of a slot lies in a range of its partition, if anything.
pub(super) fn overlap(own: &Range<usize>, slot: &Slot) -> Option<Range<usize>> {
    let start = own.start.max(slot.offset);
    let end = own.end.min(slot.offset + slot.len);
    (start < end).then_some(start..end)
}
