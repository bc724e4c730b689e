//! Data-parallel traffic: the groups and times of a block's parameter gathers and gradient reductions.

use catalog::{Bytes, Cluster, DType, Domain, Seconds};
use dtensor::CollectiveKind;
use plans::{Axis, Decisions, Group, Zero};

use crate::known;
use crate::messages::Message;
use crate::states::{Elements, Sharding};
use crate::{CostError, Scenario};

/// What the data-parallel messages of a stage hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buckets {
    /// The tensors of one block.
    Blocks,
    /// Tensors of this many elements, of several blocks where blocks are smaller. A block with more has a message of its own.
    Of(Elements),
}

impl Buckets {
    /// Elements of the buckets of dense states, and of those of expert states.
    fn by_kind(self) -> [Option<u64>; 2] {
        match self {
            Self::Blocks => [None; 2],
            Self::Of(elements) => [Some(elements.dense), Some(elements.expert)],
        }
    }
}

/// The process groups over which states are sharded and gradients reduced.
#[derive(Clone, Copy, Debug)]
pub struct DataParallel {
    /// ZeRO level and sizes of the sharding groups.
    pub sharding: Sharding,
    /// Ranks that shard dense states; under ZeRO-0, those that hold equal copies.
    dense: Group,
    /// Ranks that shard expert states; under ZeRO-0, those that hold equal copies.
    expert: Group,
    /// Ranks that hold copies of the same shard.
    replicate: Group,
}

impl DataParallel {
    /// The groups of a strategy. Context-parallel ranks hold the same parameters, so they shard and reduce together
    /// with data-parallel ones.
    #[must_use]
    pub fn new(strategy: &Decisions, cluster: &Cluster) -> Self {
        let cp = strategy.group(Axis::Cp);
        let shard = strategy.group(Axis::DpShard);
        let replicate = strategy.group(Axis::DpReplicate);
        let domain = cluster.domain(strategy.world());
        let sharded = strategy.zero != Zero::Z0;
        let dense = if sharded {
            joined(cp, shard, domain)
        } else {
            joined(joined(cp, shard, domain), replicate, domain)
        };
        let edp = strategy.group(Axis::Edp);
        let copies = if sharded { strategy.dp_replicate } else { 1 };
        let expert = Group {
            size: (edp.size / copies).max(1),
            stride: edp.stride,
        };
        let sharding = Sharding {
            zero: strategy.zero,
            dense: if sharded { dense.size } else { 1 },
            expert: if sharded { expert.size } else { 1 },
        };
        let alone = Group { size: 1, stride: 1 };
        Self {
            sharding,
            dense,
            expert,
            replicate: if sharded { replicate } else { alone },
        }
    }

    /// Number of ranks over which a dense gradient is summed.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        self.dense.size * self.replicate.size
    }

    /// Number of ranks that shard (or, under ZeRO-0, copy) dense states, and number for expert states.
    #[must_use]
    pub fn shared_by(&self) -> (u64, u64) {
        (self.dense.size, self.expert.size)
    }

    /// Number of ranks that hold copies of the same shard.
    #[must_use]
    pub fn replicas(&self) -> u64 {
        self.replicate.size
    }

    /// Whether gathers use network cards, and whether reductions do: some of their ranks are in different scale-up domains.
    pub(crate) fn uses_cards(&self, domain: Domain) -> [bool; 2] {
        let [gathers, sums] = [&[self.dense, self.expert][..], &[self.replicate]]
            .map(|groups| groups.iter().any(|group| group.lies_across(domain)));
        [gathers, gathers || sums]
    }

    /// The factor, at least 1, by which kernels take longer while gradients or parameters are sent. NCCL takes one multiprocessor for
    /// each channel. A group that spans nodes has two channels for every network card that it uses (NVIDIA/nccl@5067397,
    /// `graph/connect.cc`), so the factor grows with the group's ranks in a node. Assumed: each of these ranks uses a card of its own,
    /// and under HSDP the sums over copies of a shard slow kernels as much as the messages of the group that holds the shards.
    pub(crate) fn slowdown(&self, scenario: &Scenario) -> f64 {
        self.slowdown_of_group(scenario.slowdown_beside_nccl(), scenario.domain())
    }

    /// The factor of [`Self::slowdown`]; `within_node` is that of groups within a node.
    fn slowdown_of_group(&self, within_node: f64, domain: Domain) -> f64 {
        let together = self.dense.ranks_per_domain(domain);
        let share = match together == self.dense.size {
            true => 1.0,
            false => {
                let cards = known::CARDS_FOR_ALL_CHANNELS.factor();
                (together as f64 / cards.min(domain.gpus as f64)).min(1.0)
            }
        };
        1.0 + (within_node - 1.0) * share
    }

    /// Time to gather the parameters of a block in the type `gathered`.
    ///
    /// # Errors
    /// When messages were not measured.
    pub(crate) fn gather(
        &self,
        elements: Elements,
        message: Message<'_>,
        gathered: DType,
        buckets: Buckets,
    ) -> Result<Seconds, CostError> {
        let kind = CollectiveKind::AllGather;
        self.within_groups(elements, gathered, kind, message, buckets)
    }

    /// What a collective of this many bytes between the ranks that share dense states takes beyond the time in which a much larger one
    /// moves as many.
    ///
    /// # Errors
    /// When messages were not measured.
    pub(crate) fn start(
        &self,
        kind: CollectiveKind,
        bytes: Bytes,
        message: Message<'_>,
    ) -> Result<Seconds, CostError> {
        const LARGE: Bytes = Bytes(1 << 40);
        let time = |bytes| message(kind, bytes, self.dense);
        let moved = (time(LARGE * 2)? - time(LARGE)?) * (bytes.as_f64() / LARGE.as_f64());
        Ok((time(bytes)? - moved).max(Seconds(0.0)))
    }

    /// Time to reduce the gradients of a block; `kind` says whether every rank gets all sums.
    ///
    /// # Errors
    /// When messages were not measured.
    pub(crate) fn reduce(
        &self,
        elements: Elements,
        message: Message<'_>,
        reduced: DType,
        kind: CollectiveKind,
        buckets: Buckets,
    ) -> Result<Seconds, CostError> {
        let within = self.within_groups(elements, reduced, kind, message, buckets)?;
        if self.replicate.size == 1 {
            return Ok(within);
        }
        let shard =
            elements.dense.div_ceil(self.dense.size) + elements.expert.div_ceil(self.expert.size);
        let [bucket, _] = buckets.by_kind();
        let bucket = bucket.map(|elements| elements.div_ceil(self.dense.size));
        let sum = |bytes| message(CollectiveKind::AllReduce, bytes, self.replicate);
        Ok(within + bucketed(shard, bucket, reduced, sum)?)
    }

    /// Time of a collective of the ranks that share dense states, and of one of those that share expert states.
    fn within_groups(
        &self,
        elements: Elements,
        dtype: DType,
        kind: CollectiveKind,
        message: Message<'_>,
        buckets: Buckets,
    ) -> Result<Seconds, CostError> {
        let mut total = Seconds(0.0);
        let [dense, expert] = buckets.by_kind();
        for (count, group, bucket) in [
            (elements.dense, self.dense, dense),
            (elements.expert, self.expert, expert),
        ] {
            if count > 0 && group.size > 1 {
                total += bucketed(count, bucket, dtype, |bytes| message(kind, bytes, group))?;
            }
        }
        Ok(total)
    }
}

/// Time of a collective over the `count` elements of a block, or its share of the time of a larger bucket.
fn bucketed(
    count: u64,
    bucket: Option<u64>,
    dtype: DType,
    time: impl Fn(Bytes) -> Result<Seconds, CostError>,
) -> Result<Seconds, CostError> {
    match bucket {
        Some(bucket) if bucket > count => {
            let whole = time(Bytes(bucket * dtype.size()))?;
            Ok(whole * (count as f64 / bucket as f64))
        }
        _ => time(Bytes(count * dtype.size())),
    }
}

/// The union of two axes as one group of `inner.size · outer.size` ranks; `domain` is the number of ranks that share a
/// scale-up domain. If the axes are not neighbours in rank order, no stride describes the group exactly; it gets the
/// stride that puts the right number of its ranks into a domain.
fn joined(inner: Group, outer: Group, domain: Domain) -> Group {
    if outer.size == 1 {
        return inner;
    }
    if inner.size == 1 {
        return outer;
    }
    let size = inner.size * outer.size;
    if outer.stride == inner.stride * inner.size {
        return Group {
            size,
            stride: inner.stride,
        };
    }
    let together = inner.ranks_per_domain(domain) * outer.ranks_per_domain(domain);
    Group {
        size,
        stride: (domain.gpus / together).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_across_nodes_take_fewer_multiprocessors() {
        let cluster = catalog::load::cluster("dgx-a100").expect("a preset");
        // All GPUs of one node; of several; one of every node; half a node; half of every node.
        for (size, stride, slowdown) in [
            (8, 1, 1.8),
            (64, 1, 1.8),
            (16, 8, 1.1),
            (4, 1, 1.8),
            (32, 2, 1.4),
        ] {
            let alone = Group { size: 1, stride: 1 };
            let groups = DataParallel {
                sharding: Sharding {
                    zero: Zero::Z3,
                    dense: size,
                    expert: 1,
                },
                dense: Group { size, stride },
                expert: alone,
                replicate: alone,
            };
            let found = groups.slowdown_of_group(1.8, cluster.domain(64));
            assert!((found - slowdown).abs() < 1e-9, "{size} {stride}: {found}");
            // In a larger domain eight ranks use eight cards as well.
            let mut larger = cluster.clone();
            larger.scale_up_domain = 32;
            let wide = groups.slowdown_of_group(1.8, larger.domain(64));
            assert!(wide >= found, "{size} {stride}: {wide}");
        }
    }
}
