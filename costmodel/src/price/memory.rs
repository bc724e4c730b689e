//! Kernels bound by memory bandwidth: bytes over an achieved share of the datasheet bandwidth, plus
//! a fixed start.

use catalog::{Bandwidth, Bytes, Device, Origin, Seconds};
use plans::UsedConstant;

use super::measured::OfGpus;
use crate::known::{self, constant};

/// Classes of memory-bound kernels that reach different shares of the bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Elementwise kernel, one pass over the data.
    Pointwise,
    /// Fused norm, forward.
    NormForward,
    /// Fused norm, backward.
    NormBackward,
    /// PyTorch's own norm, forward.
    EagerNormForward,
    /// PyTorch's own norm, backward.
    EagerNormBackward,
    /// Softmax of attention scores.
    Softmax,
    /// Cross-entropy over logits in one kernel.
    CrossEntropy,
    /// Cross-entropy over logits by one operator after another.
    LossOperators,
    /// Row lookup in an embedding table, and its scatter in backward.
    Embedding,
    /// Sorting tokens by expert, and back.
    Permute,
    /// One of the kernels of a recurrence in chunks.
    Scan,
    /// Dropout that stores its mask.
    Dropout,
    /// Optimizer step with multi-tensor kernels.
    Optimizer,
    /// Optimizer step with one kernel per operation and tensor list.
    UnfusedOptimizer,
    /// Optimizer step with moments in 8 bits.
    EightBitOptimizer,
}

#[derive(Clone, Debug)]
pub(super) struct MemoryPrices {
    /// Memory bandwidth of the datasheet; with measured copies, their rate over the share of the
    /// bandwidth that elementwise kernels reach.
    bandwidth: Bandwidth,
    measured: Option<(Bandwidth, String)>,
}

/// Share of the bandwidth that a class of kernels reaches.
fn share(kind: MemoryKind) -> f64 {
    let known = match kind {
        MemoryKind::Pointwise => known::POINTWISE,
        MemoryKind::NormForward => known::NORM_FORWARD,
        MemoryKind::NormBackward => known::NORM_BACKWARD,
        MemoryKind::EagerNormForward => known::EAGER_NORM_FORWARD,
        MemoryKind::EagerNormBackward => known::EAGER_NORM_BACKWARD,
        MemoryKind::Softmax => known::SOFTMAX,
        MemoryKind::CrossEntropy => known::CROSS_ENTROPY,
        MemoryKind::LossOperators => known::LOSS_OPERATORS,
        MemoryKind::Embedding => known::EMBEDDING,
        MemoryKind::Permute => known::PERMUTE,
        MemoryKind::Scan => known::SCAN,
        MemoryKind::Dropout => known::DROPOUT,
        MemoryKind::Optimizer => known::OPTIMIZER,
        MemoryKind::UnfusedOptimizer => known::UNFUSED_OPTIMIZER,
        MemoryKind::EightBitOptimizer => known::EIGHT_BIT_OPTIMIZER,
    };
    known.factor()
}

impl MemoryPrices {
    pub(super) fn new(device: &Device, profile: Option<OfGpus<'_>>) -> Self {
        let measured = profile.and_then(|profile| Some((profile.copies()?, profile.source())));
        let copies = share(MemoryKind::Pointwise);
        Self {
            bandwidth: match &measured {
                Some((rate, _)) => Bandwidth(rate.0 / copies),
                None => device.memory_bandwidth.value,
            },
            measured,
        }
    }

    pub(super) fn price(&self, kind: MemoryKind, bytes: Bytes) -> Seconds {
        match bytes.0 {
            0 => Seconds(0.0),
            _ => known::KERNEL_START.seconds() + bytes / (self.bandwidth * share(kind)),
        }
    }

    /// The provenance row of the copy rate that a profile measured, if there is one. The shares of the bandwidth have
    /// their rows in `known`.
    pub(super) fn provenance(&self) -> Vec<UsedConstant> {
        let measured = self.measured.iter().map(|(rate, source)| {
            let value = format!("{:.0} GB/s: memory bandwidth scaled by it", rate.0 / 1e9);
            constant("copies on the device", value, Origin::Measured, source)
        });
        measured.collect()
    }
}
