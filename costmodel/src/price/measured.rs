//! What a profile of a cluster's GPUs says that corrects tables. It counts only for kernels that
//! other systems run too: products, copies, messages, and a library's attention. Left out are
//! weight gradients, which our executor accumulates in 32 bits, and 8-bit products with our casts.

use catalog::profile::{Machine, Measured, Profile};
use catalog::{Bandwidth, Bytes, Seconds};
use dtensor::{AttentionShape, CollectiveKind};

use super::between_gpus;

/// A profile that was measured on GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfGpus<'p>(pub(super) &'p Profile);

impl OfGpus<'_> {
    fn named<const N: usize>(&self, name: &str) -> impl Iterator<Item = ([u64; N], f64)> {
        let named = move |m: &&Measured| m.kernel == name;
        let measured = self.0.measured.iter().filter(named);
        measured.filter_map(|m| Some((m.sizes[..].try_into().ok()?, m.seconds)))
    }

    /// Measured times, in seconds, of products by `[m, n, k]`: forward and data gradients, for operands of the type
    /// that profiles call `element`.
    pub(super) fn products(&self, element: &str) -> Vec<([u64; 3], f64)> {
        let passes = ["forward", "backward"].map(|pass| format!("matmul {pass} {element}"));
        let products = passes.iter().flat_map(|name| self.named(name));
        products.collect()
    }

    /// Measured times, in seconds, of a library's causal attention in 16 bits, forward or backward, by
    /// `[sequences × heads, queries, keys, head dimension]`.
    pub(super) fn attentions(&self, backward: bool) -> Vec<([u64; 4], f64)> {
        if self
            .machine()
            .gpu
            .as_ref()
            .is_none_or(|gpu| gpu.attention.is_none())
        {
            return Vec::new();
        }
        // The first of the operators that share one kernel was measured with the time of the whole kernel.
        let first = match backward {
            false => "attention scores forward bf16",
            true => "attention context of input 0 backward bf16",
        };
        self.named(first).collect()
    }

    /// Measured times, in seconds, of messages between hosts, by `[ranks, ranks per host, bytes]`.
    pub(super) fn over_hosts(&self, kind: CollectiveKind) -> Vec<([u64; 3], f64)> {
        let name = format!("{} over hosts", between_gpus::name(kind));
        self.named(&name).collect()
    }

    /// Bytes per second that a copy on the device reads and writes, from the largest measured copy: smaller ones stay
    /// in caches.
    pub(super) fn copies(&self) -> Option<Bandwidth> {
        let ([elements], seconds) = self.named("copy").max_by_key(|&([elements], _)| elements)?;
        let moved = Bytes(2 * 4 * elements);
        Some(Bandwidth(moved.as_f64() / Seconds(seconds).0))
    }

    fn machine(&self) -> &Machine {
        &self.0.machine
    }

    /// Name of the measured machine, as the source of a price.
    pub(super) fn source(&self) -> String {
        format!("profile of {}", self.machine().described())
    }
}

/// The attention shape that a measurement is of.
pub(super) fn attention([lines, q_len, kv_len, dim]: [u64; 4]) -> AttentionShape {
    AttentionShape {
        batch: 1,
        heads: lines,
        kv_heads: lines,
        q_len,
        kv_len,
        qk_dim: dim,
        v_dim: dim,
        causal: true,
        window: None,
    }
}

/// Text for the provenance: a table, corrected by that many measurements with ratios in that range.
pub(super) fn beside((count, [lowest, highest]): (usize, [f64; 2]), table: &str) -> String {
    format!(
        "{count} measured, {lowest:.2} to {highest:.2} times {table}; others scaled like the nearest of them"
    )
}
