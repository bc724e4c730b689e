//! Lower bounds from physics: a kernel takes at least its operations over the datasheet's peak of their type, and at
//! least its bytes over the datasheet's memory bandwidth (operands come from memory, not from caches); a message takes
//! at least its bytes over the links that carry them.
//!
//! `TablePrices` raises every price to these bounds as its last step: a table of a related GPU, a fit beyond the sizes
//! it was made from, or a wrong measurement may promise more than the device can do.

use catalog::{
    Architecture, Bandwidth, Bytes, Cluster, DType, Device, Domain, FlopRate, Seconds, Window,
};
use dtensor::{AttentionShape, CollectiveKind};
use plans::Group;

/// The bounds of a device and its network.
#[derive(Clone, Debug)]
pub(super) struct Roofline {
    device: Device,
    near: Bandwidth,
    far: Bandwidth,
    domain: u64,
    placed: Domain,
    in_switch: bool,
}

impl Roofline {
    pub(super) fn new(cluster: &Cluster, ranks: u64) -> Self {
        Self {
            device: cluster.device.clone(),
            near: cluster.scale_up.bandwidth.value,
            far: cluster.scale_out.bandwidth.value,
            domain: cluster.scale_up_domain.max(1),
            placed: cluster.domain(ranks),
            in_switch: cluster.in_switch_reduction,
        }
    }

    /// Bound of `count` products `[m, k] × [k, n]`, each with operands and a result of its own.
    pub(super) fn products(&self, count: u64, [m, n, k]: [u64; 3], dtype: DType) -> Seconds {
        let [count, m, n, k] = [count, m, n, k].map(|size| size as f64);
        let elements = count * (m * k + k * n + m * n);
        self.bound(
            2.0 * count * m * n * k,
            elements * dtype.size() as f64,
            dtype,
        )
    }

    /// Bound of one attention kernel: two products forward; five in backward, which computes the scores again.
    pub(super) fn attention(
        &self,
        shape: &AttentionShape,
        dtype: DType,
        backward: bool,
    ) -> Seconds {
        let (qk, v) = (shape.qk_dim as f64, shape.v_dim as f64);
        let per_pair = if backward {
            2.0 * (3.0 * qk + 2.0 * v)
        } else {
            2.0 * (qk + v)
        };
        let flops = shape.batch as f64 * shape.heads as f64 * pairs(shape) * per_pair;
        let tokens =
            |heads: u64, length: u64| shape.batch as f64 * heads as f64 * length as f64 * (qk + v);
        let elements = tokens(shape.heads, shape.q_len) + tokens(shape.kv_heads, shape.kv_len);
        self.bound(flops, elements * dtype.size() as f64, dtype)
    }

    /// Bound of reading and writing `bytes` on the device.
    pub(super) fn moved(&self, bytes: Bytes) -> Seconds {
        bytes / self.device.memory_bandwidth.value
    }

    /// Bound of `flops` operations of a type that read and write `bytes` bytes.
    pub(super) fn bound(&self, flops: f64, bytes: f64, dtype: DType) -> Seconds {
        let peak = self
            .device
            .peak_rate(dtype)
            .unwrap_or(FlopRate(f64::INFINITY));
        Seconds(flops / peak.0).max(Seconds(bytes / self.device.memory_bandwidth.value.0))
    }

    /// Bound of a message within a whole group; bytes by the convention of [`dtensor::Collective`].
    ///
    /// Inside a domain a rank receives, or sends, what the others have; sums travel twice unless switches compute them.
    /// Between domains, what the other domains have enters a domain over the network cards of the group's ranks there.
    pub(super) fn collective(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Seconds {
        if group.size <= 1 {
            return Seconds(0.0);
        }
        let ranks = group.size as f64;
        let together = group.ranks_per_domain(self.placed) as f64;
        let all_near = together >= ranks;
        let summed_near = if self.in_switch { 1.0 } else { 2.0 };
        let bytes = bytes.as_f64();
        let (near, far) = match kind {
            CollectiveKind::SendRecv | CollectiveKind::RingExchange => {
                return self.transfer(bytes, group);
            }
            CollectiveKind::AllToAll => (
                bytes * (together - 1.0) / ranks,
                bytes * (ranks - together) / ranks,
            ),
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => (
                bytes * (together - 1.0) / ranks,
                bytes * (ranks - together) / ranks / together,
            ),
            // Ranks of a domain may sum first and send one result.
            CollectiveKind::AllReduce => (
                summed_near * bytes * (together - 1.0) / ranks,
                2.0 * bytes * (ranks - together) / ranks / together,
            ),
        };
        let near = Seconds(near / self.near_links(together));
        let far = if all_near {
            Seconds(0.0)
        } else {
            Seconds(far / self.far.0)
        };
        near.max(far)
    }

    /// Bound of a transfer from every rank of a group to the next: the slowest link decides.
    fn transfer(&self, bytes: f64, group: Group) -> Seconds {
        let rate = if group.lies_across(self.placed) {
            self.far.0
        } else {
            self.near_links(2.0)
        };
        Seconds(bytes / rate)
    }

    /// Rate of a rank's links to the others of `ranks` ranks in its domain. A full mesh has one link for each.
    fn near_links(&self, ranks: f64) -> f64 {
        if self.device.architecture == Architecture::Cdna3 && self.domain > 1 {
            self.near.0 * (ranks - 1.0).max(1.0) / (self.domain - 1) as f64
        } else {
            self.near.0
        }
    }
}

/// Pairs of a query and a key that it may attend to. With keys of other ranks, a rank's queries are spread over the
/// sequence (zig-zag), so that each sees as many keys as the average query.
fn pairs(shape: &AttentionShape) -> f64 {
    let (queries, keys) = (shape.q_len as f64, shape.kv_len as f64);
    if !shape.causal {
        return queries * keys;
    }
    let window = shape.window.unwrap_or(Window::Sliding(shape.kv_len));
    queries * window.mean(shape.kv_len)
}
