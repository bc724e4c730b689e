//! What a profile says of a cluster's GPUs that tables say too. Only kernels that other systems run as well: products
//! and copies, attention where a library ran it, messages. Gradients of weights are left out, for ours are added up in 32
//! bits, and products in 8 bits, for ours count their casts.

use catalog::profile::{Machine, Measured, Profile};
use catalog::{Bandwidth, Bytes, Seconds};
use dtensor::{AttentionShape, CollectiveKind};

use super::between_gpus;

/// A profile of GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfGpus<'p>(pub(super) &'p Profile);

impl OfGpus<'_> {
    fn named<const N: usize>(&self, name: &str) -> impl Iterator<Item = ([u64; N], f64)> {
        let named = move |m: &&Measured| m.kernel == name;
        let measured = self.0.measured.iter().filter(named);
        measured.filter_map(|m| Some((m.sizes[..].try_into().ok()?, m.seconds)))
    }

    /// Products `[m, n, k]` forward, and those that are gradients of what was multiplied; of operands that profiles
    /// name so.
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
        // The first piece stands for all that one kernel runs.
        let first = match backward {
            false => "attention scores forward bf16",
            true => "attention context of input 0 backward bf16",
        };
        self.named(first).collect()
    }

    /// Messages between hosts: `[ranks, as many of them as are on each host, bytes]`.
    pub(super) fn over_hosts(&self, kind: CollectiveKind) -> Vec<([u64; 3], f64)> {
        let name = format!("{} over hosts", between_gpus::name(kind));
        self.named(&name).collect()
    }

    /// Bytes that a copy on the device reads and writes in a second, by the largest that was measured: smaller ones
    /// stay in caches.
    pub(super) fn copies(&self) -> Option<Bandwidth> {
        let ([elements], seconds) = self.named("copy").max_by_key(|&([elements], _)| elements)?;
        let moved = Bytes(2 * 4 * elements);
        Some(Bandwidth(moved.as_f64() / Seconds(seconds).0))
    }

    fn machine(&self) -> &Machine {
        &self.0.machine
    }

    /// Whose measurements these are.
    pub(super) fn source(&self) -> String {
        format!("profile of {}", self.machine().described())
    }
}

/// The attention that a measurement is of.
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

/// What prices rest on where some sizes were measured, for people.
pub(super) fn beside((count, [lowest, highest]): (usize, [f64; 2]), table: &str) -> String {
    format!(
        "{count} measured, {lowest:.2} to {highest:.2} times {table}; others by it and the nearest of them"
    )
}
