//! The flat partition of all parameters of one kind, and the shard of it that this rank owns.

use std::ops::Range;

use catalog::{Bytes, DType, Zero};

use super::device::Device;
use super::slot::{Kind, Slot};

/// The settings that a stage's states depend on.
#[derive(Clone, Copy, Debug)]
pub struct StatesPlan {
    /// ZeRO level.
    pub zero: Zero,
    /// Type of the parameters as kernels read them.
    pub dtype: DType,
    /// Exact mode: whether gradients are summed by trees whose order is the same under every layout.
    pub exact: bool,
    /// Least size of a gradient bucket.
    pub bucket: Bytes,
    /// Seed of the parameters' initial values.
    pub seed: u64,
}

impl StatesPlan {
    /// Default bucket size: `bucket_cap_mb` of PyTorch's DistributedDataParallel.
    pub const BUCKET: Bytes = Bytes(25 << 20);
}

/// The groups that share the states of one kind of parameters with this rank.
#[derive(Clone, Debug)]
pub struct Sharing<G> {
    /// Ranks that each own a different shard.
    pub shard: G,
    /// The same ranks with separate channels, so that parameters can be gathered while gradients are reduced.
    pub gather: G,
    /// Ranks that own the same shard (replicas).
    pub replicate: G,
    /// All data-parallel ranks: shards and replicas.
    pub all: G,
    /// All data-parallel ranks and the tensor-parallel ranks.
    pub all_with_tp: G,
    /// Tensor-parallel ranks.
    pub tp: G,
    /// Whether this rank is the one of its replicas that counts in sums over all parameters.
    pub speaks: bool,
}

/// The flat states of one kind of parameters.
pub(super) struct Partition<D: Device> {
    pub(super) kind: Kind,
    pub(super) sharing: Sharing<D::Group>,
    /// Number of elements before sharding.
    pub(super) elements: usize,
    /// Elements whose optimizer states this rank owns.
    pub(super) own: Range<usize>,
    pub(super) master: D::Flat,
    pub(super) momentum: D::Flat,
    pub(super) variance: D::Flat,
    /// Gradient sums: of all elements under ZeRO-0 and 1, of the own shard under 2 and 3.
    pub(super) gradient: D::Flat,
    /// Under ZeRO-3, the own shard in the type that kernels read.
    pub(super) shard: Option<D::Tensor>,
}

impl<D: Device> Partition<D> {
    pub(super) fn new(
        device: &D,
        (kind, sharing): (Kind, Sharing<D::Group>),
        slots: &[Slot],
        plan: StatesPlan,
    ) -> Result<Self, D::Error> {
        let mine = || slots.iter().filter(|s| s.kind == kind);
        let elements = mine().map(|s| s.len).sum::<usize>();
        let own = owned(elements, D::size(&sharing.shard), D::index(&sharing.shard));
        let draw = || {
            let parts = mine().filter_map(|slot| {
                let range = overlap(&own, slot)?;
                Some(slot.initial(
                    plan.seed,
                    range.start - slot.offset..range.end - slot.offset,
                ))
            });
            parts.collect::<Vec<_>>().concat()
        };
        let gradients = if plan.zero >= Zero::Z2 {
            own.len()
        } else {
            elements
        };
        let mut partition = Self {
            kind,
            sharing,
            elements,
            master: device.flat(own.len(), &draw)?,
            momentum: device.zeros(own.len())?,
            variance: device.zeros(own.len())?,
            gradient: device.zeros(gradients)?,
            shard: None,
            own,
        };
        if plan.zero == Zero::Z3 && !partition.is_whole() {
            partition.shard = Some(partition.rounded(device, plan.dtype)?);
        }
        Ok(partition)
    }

    /// Elements that the member `rank` of the sharding group owns.
    pub(super) fn owned(&self, rank: usize) -> Range<usize> {
        owned(self.elements, D::size(&self.sharing.shard), rank)
    }

    /// The own shard in the type that kernels read.
    pub(super) fn rounded(&self, device: &D, dtype: DType) -> Result<D::Tensor, D::Error> {
        let len = self.own.len();
        device.rounded(&self.master, 0..len, vec![len], dtype)
    }

    /// Whether every rank owns all elements (no sharding).
    pub(super) fn is_whole(&self) -> bool {
        D::size(&self.sharing.shard) == 1
    }

    /// Whether no other rank has gradients of its parameters.
    pub(super) fn is_alone(&self) -> bool {
        D::size(&self.sharing.all) == 1 && D::size(&self.sharing.tp) == 1
    }

    /// The position of elements of the partition within the gradient buffer.
    pub(super) fn in_gradient(&self, range: &Range<usize>) -> Range<usize> {
        let base = if D::len(&self.gradient) == self.elements {
            0
        } else {
            self.own.start
        };
        range.start - base..range.end - base
    }
}

/// Elements of a partition that rank `rank` of `ranks` owns.
pub(super) fn owned(elements: usize, ranks: usize, rank: usize) -> Range<usize> {
    let chunk = elements.div_ceil(ranks);
    let start = (chunk * rank).min(elements);
    start..(start + chunk).min(elements)
}

/// The elements of a slot that lie in a range of its partition, if any.
pub(super) fn overlap(own: &Range<usize>, slot: &Slot) -> Option<Range<usize>> {
    let start = own.start.max(slot.offset);
    let end = own.end.min(slot.offset + slot.len);
    (start < end).then_some(start..end)
}
