//! Kernels bound by memory bandwidth: bytes over an achieved share of the datasheet bandwidth, plus
//! a fixed start.

use catalog::{Bandwidth, Bytes, Device, Origin, Seconds};
use plans::UsedConstant;

use super::measured::OfGpus;
use super::priced::{Priced, constant};

/// Classes of memory-bound kernels that reach different shares of the bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Elementwise, one pass.
    Pointwise,
    /// Fused norm.
    NormForward,
    /// Fused norm, backward.
    NormBackward,
    /// PyTorch's own norm.
    EagerNormForward,
    /// PyTorch's own norm, backward.
    EagerNormBackward,
    /// Softmax of attention scores.
    Softmax,
    /// Cross-entropy over logits.
    CrossEntropy,
    /// Row lookup and scatter.
    Embedding,
    /// Tokens ordered by expert and back.
    Permute,
    /// Dropout with mask.
    Dropout,
    /// Multi-tensor optimizer.
    Optimizer,
    /// Optimizer of one kernel per operation and tensor list.
    UnfusedOptimizer,
}

/// Fixed time of a memory-bound kernel (ai-dynamo/aiconfigurator `mem_empirical_constant_latency`).
const START: Seconds = Seconds(3e-6);

#[derive(Clone, Debug)]
pub(super) struct MemoryPrices {
    /// That of the datasheet; or of which measured copies reach the share of one pass.
    bandwidth: Bandwidth,
    measured: Option<(Bandwidth, String)>,
}

/// Share of the datasheet bandwidth, with its source.
fn share(kind: MemoryKind) -> (f64, &'static str) {
    match kind {
        MemoryKind::Pointwise => (
            0.87,
            "BabelStream 0.79-0.87 of spec (Azure/AI-benchmarking-guide); vidur add 0.95, act 0.5-0.58",
        ),
        MemoryKind::NormForward => (
            0.74,
            "cudnn-frontend@3929da2 norms, H200: 3352-3770 of 4800 GB/s",
        ),
        MemoryKind::NormBackward => (
            0.66,
            "cudnn-frontend@3929da2 norms, H200: 3087-3801 of 4800 GB/s",
        ),
        MemoryKind::EagerNormForward => (
            0.56,
            "cudnn-frontend@3929da2 norms, PyTorch on H200: 2670 of 4800 GB/s",
        ),
        MemoryKind::EagerNormBackward => (
            0.31,
            "cudnn-frontend@3929da2 norms, PyTorch on H200: 1467 of 4800 GB/s",
        ),
        MemoryKind::Softmax => (0.70, "between norm and elementwise kernels"),
        MemoryKind::CrossEntropy => (
            0.30,
            "Liger-Kernel@ead96b61: Megatron's fused kernel, 8192 × 131072 on H100, 18.2 ms",
        ),
        MemoryKind::Embedding => (0.50, "gathered rows; Liger-Kernel embedding benchmark"),
        MemoryKind::Permute => (0.35, "SimuMax permute 0.19 (A100), 0.50 (B200)"),
        MemoryKind::Dropout => (0.70, "elementwise with random numbers"),
        MemoryKind::Optimizer => (0.80, "fused Adam 0.75-0.85 of bandwidth"),
        MemoryKind::UnfusedOptimizer => (0.27, "torch foreach AdamW on B200: 0.23-0.31"),
    }
}

impl MemoryPrices {
    pub(super) fn new(device: &Device, profile: Option<OfGpus<'_>>) -> Self {
        let measured = profile.and_then(|profile| Some((profile.copies()?, profile.source())));
        let (copies, _) = share(MemoryKind::Pointwise);
        Self {
            bandwidth: match &measured {
                Some((rate, _)) => Bandwidth(rate.0 / copies),
                None => device.memory_bandwidth.value,
            },
            measured,
        }
    }

    pub(super) fn price(&self, kind: MemoryKind, bytes: Bytes) -> Priced {
        if bytes.0 == 0 {
            return Priced {
                time: Seconds(0.0),
                origin: Origin::Published,
            };
        }
        let time = START + bytes / (self.bandwidth * share(kind).0);
        Priced {
            time,
            origin: Origin::Published,
        }
    }

    pub(super) fn provenance(&self) -> Vec<UsedConstant> {
        let kinds = [
            ("elementwise kernels", MemoryKind::Pointwise),
            ("norms, forward", MemoryKind::NormForward),
            ("norms, backward", MemoryKind::NormBackward),
            ("cross-entropy", MemoryKind::CrossEntropy),
            ("optimizer", MemoryKind::Optimizer),
        ];
        let measured = self.measured.iter().map(|(rate, source)| {
            let value = format!("{:.0} GB/s: memory bandwidth scaled by it", rate.0 / 1e9);
            constant("copies on the device", value, Origin::Measured, source)
        });
        let shares = kinds.into_iter().map(|(name, kind)| {
            let (share, source) = share(kind);
            let value = format!("{share} of memory bandwidth");
            constant(name, value, Origin::Published, source)
        });
        measured.chain(shares).collect()
    }
}
