//! What one kernel or collective costs on a device and its network, alone.

mod attention;
mod gemm;
mod memory;
mod network;
mod profile;

use dtensor::{AttentionShape, CollectiveKind};
use plans::{Group, UsedConstant};
use spec::fitted::Constant;
use spec::runtime::AttentionKernel;
use spec::{Architecture, Bytes, Cluster, DType, Device, Fitted, Origin, Seconds};

pub use attention::charts as attention_charts;
pub use gemm::GemmLayout;
pub use memory::MemoryKind;
pub use profile::ProfilePrices;

/// A price and the evidence behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    /// Time alone on the device or network.
    pub time: Seconds,
    /// Weakest evidence used.
    pub origin: Origin,
}

/// Why a cluster has no prices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PriceError {
    /// The device names a table that does not exist.
    #[error("unknown kernel table {0}")]
    UnknownTable(String),
}

/// Where the prices of a cluster come from.
#[derive(Clone, Debug)]
pub enum Prices {
    /// Tables and models of accelerators and networks.
    Tables(Box<TablePrices>),
    /// Measurements of this very machine.
    Profile(ProfilePrices),
}

/// Prices of an accelerator cluster's kernels and collectives.
#[derive(Clone, Debug)]
pub struct TablePrices {
    gemm: gemm::GemmPrices,
    attention: attention::AttentionPrices,
    memory: memory::MemoryPrices,
    network: network::NetworkPrices,
    fitted: Fitted,
}

impl Prices {
    /// Prices of a cluster for jobs of that many ranks.
    ///
    /// # Errors
    /// When the device names a table that does not exist.
    pub fn new(cluster: &Cluster, ranks: u64, fitted: &Fitted) -> Result<Self, PriceError> {
        match &cluster.profile {
            Some(profile) => {
                let at_once = cluster.at_once(ranks);
                Ok(Self::Profile(ProfilePrices::new(profile, at_once)))
            }
            None => Ok(Self::Tables(Box::new(TablePrices::new(cluster, fitted)?))),
        }
    }

    /// The constants behind these prices.
    #[must_use]
    pub fn provenance(&self) -> Vec<UsedConstant> {
        match self {
            Self::Tables(tables) => tables.provenance(),
            Self::Profile(profile) => profile.provenance(),
        }
    }
}

impl TablePrices {
    fn new(cluster: &Cluster, fitted: &Fitted) -> Result<Self, PriceError> {
        let device: &Device = &cluster.device;
        Ok(Self {
            gemm: gemm::GemmPrices::new(device, fitted)?,
            attention: attention::AttentionPrices::new(device, fitted),
            memory: memory::MemoryPrices::new(device),
            network: network::NetworkPrices::new(cluster),
            fitted: *fitted,
        })
    }

    /// A dense product `[m, k] × [k, n]`.
    #[must_use]
    pub fn gemm(&self, m: u64, n: u64, k: u64, dtype: DType, layout: GemmLayout) -> Priced {
        self.gemm.price(m, n, k, dtype, layout)
    }

    /// One product per expert; `m` rows over all groups (in weight gradients, `k` is).
    #[must_use]
    pub fn grouped_gemm(
        &self,
        groups: u64,
        m: u64,
        n: u64,
        k: u64,
        dtype: DType,
        layout: GemmLayout,
    ) -> Priced {
        self.gemm.grouped(groups, [m, n, k], dtype, layout)
    }

    /// Equal products, one per sequence and head.
    #[must_use]
    pub fn batched_gemm(&self, batch: u64, m: u64, n: u64, k: u64, dtype: DType) -> Priced {
        self.gemm.batched(batch, [m, n, k], dtype)
    }

    /// Fused attention.
    #[must_use]
    pub fn attention(
        &self,
        shape: &AttentionShape,
        kernel: AttentionKernel,
        backward: bool,
    ) -> Priced {
        self.attention.price(shape, kernel, backward)
    }

    /// A kernel bound by memory bandwidth that reads and writes `bytes` in all.
    #[must_use]
    pub fn memory_bound(&self, kind: MemoryKind, bytes: Bytes) -> Priced {
        self.memory.price(kind, bytes)
    }

    /// A collective; bytes by the convention of [`dtensor::Collective`].
    #[must_use]
    pub fn collective(&self, kind: CollectiveKind, bytes: Bytes, group: Group) -> Priced {
        self.network.collective(kind, bytes, group)
    }

    /// One transfer between neighbours of a group.
    #[must_use]
    pub fn point_to_point(&self, bytes: Bytes, group: Group) -> Priced {
        self.network.point_to_point(bytes, group)
    }

    /// Share of gradient accumulation in a fused product's epilogue that stays exposed.
    #[must_use]
    pub fn exposed_epilogue(&self) -> f64 {
        self.fitted.get(Constant::ExposedEpilogue)
    }

    fn provenance(&self) -> Vec<UsedConstant> {
        let mut used = self.gemm.provenance();
        used.extend(self.attention.provenance());
        used.extend(self.memory.provenance());
        used.extend(self.network.provenance());
        used
    }
}

/// Time in long training over short benchmarks, which run at boost clocks. Ampere: ten thousand
/// iterations of cuBLASLt against the table take 1.11 at 4096³ (Azure/AI-benchmarking-guide@8fd0c6e).
/// Hopper: fitted on published H100 runs.
pub(crate) fn sustained(architecture: Architecture, fitted: &Fitted) -> f64 {
    match architecture {
        Architecture::Hopper => fitted.get(Constant::HopperSustained),
        Architecture::Blackwell => fitted.get(Constant::BlackwellSustained),
        Architecture::Ampere => 1.11,
        Architecture::Volta | Architecture::Ada | Architecture::Cdna3 | Architecture::Cpu => 1.06,
    }
}

/// Power limit of the device that a table was measured on, watts (vendor datasheets).
fn reference_watts(table: &str) -> f64 {
    match table {
        "a100_sxm" => 400.0,
        "b200_sxm" => 1000.0,
        "b300_sxm" => 1100.0,
        "gb200" => 1200.0,
        "gb300" => 1400.0,
        "l40s" => 350.0,
        _ => 700.0,
    }
}

/// How much longer matrix kernels take on a part with a lower power limit than the table's, at the
/// same datasheet peak: dynamic power grows with `f·V²` and voltage nearly with frequency, so the
/// sustained clock follows the power limit to a power below one. A part whose peak is itself
/// lower is already scaled by the ratio of peaks.
pub(crate) fn clock_factor(device: &Device, fitted: &Fitted) -> f64 {
    let full = device.peak_rate(DType::Bf16).map_or(0.0, |rate| rate.0)
        >= 0.99 * gemm::reference_peak(&device.kernels, DType::Bf16).0;
    match device.power_watts {
        Some(watts) if full && watts > 0.0 => (reference_watts(&device.kernels) / watts)
            .max(1.0)
            .powf(fitted.get(Constant::ClockExponent)),
        _ => 1.0,
    }
}

/// Shorthand for a constant's row.
fn constant(name: &str, value: String, origin: Origin, source: &str) -> UsedConstant {
    UsedConstant {
        name: name.to_owned(),
        value,
        origin,
        source: source.to_owned(),
    }
}
