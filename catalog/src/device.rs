//! Accelerators, as data.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};

use crate::dtype::DType;
use crate::error::{Wrong, above_zero, in_range};
use crate::provenance::Sourced;
use crate::tables::{MeasuredOn, measured_on};
use crate::units::{Bandwidth, Bytes, FlopRate};

/// Microarchitecture: decides which kernels exist.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(EnumString, IntoStaticStr)]
pub enum Architecture {
    /// V100.
    Volta,
    /// A100.
    Ampere,
    /// L40S, RTX 4090.
    Ada,
    /// H100, H200.
    Hopper,
    /// B200, GB200.
    Blackwell,
    /// RTX 5090, RTX PRO 6000: compute capability 12.0, without the matrix instructions of B200.
    #[strum(serialize = "Blackwell (RTX)")]
    BlackwellRtx,
    /// MI300X and later.
    #[strum(serialize = "CDNA3")]
    Cdna3,
    /// A CPU of this machine.
    #[strum(serialize = "CPU")]
    Cpu,
}

impl Architecture {
    /// Its name as people write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The tables for a device without its own; `None` for a CPU, which is measured instead.
    ///
    /// `power` is the device's limit in watts over its 16-bit peak, if known. Ada's cards run the kernels of Blackwell's RTX
    /// cards, and the tables differ by power most of all: L40S is throttled in large products, RTX PRO 6000 is not.
    #[must_use]
    pub fn nearest_tables(self, power: Option<f64>) -> Option<&'static str> {
        const THROTTLED: &str = "l40s";
        const AT_FULL_CLOCKS: &str = "rtx_pro_6000_server";
        match self {
            Self::Volta | Self::Ampere => Some("a100_sxm"),
            Self::Ada => {
                let of = |table| measured_on(table).map_or(0.0, MeasuredOn::power_over_peak);
                let is_nearer = |power: f64| power.powi(2) > of(THROTTLED) * of(AT_FULL_CLOCKS);
                match power.is_some_and(is_nearer) {
                    true => Some(AT_FULL_CLOCKS),
                    false => Some(THROTTLED),
                }
            }
            Self::Hopper | Self::Cdna3 => Some("h100_sxm"),
            Self::Blackwell => Some("b200_sxm"),
            Self::BlackwellRtx => Some(AT_FULL_CLOCKS),
            Self::Cpu => None,
        }
    }
}

/// A resolved accelerator.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Device {
    /// Preset name, such as `h100-sxm`.
    pub name: String,
    /// Microarchitecture.
    pub architecture: Architecture,
    /// Memory that the framework sees (`torch` total, less than the label).
    pub memory: Sourced<Bytes>,
    /// Peak memory bandwidth.
    pub memory_bandwidth: Sourced<Bandwidth>,
    /// Dense peaks per operand type. The `f32` peak is that of the TF32 matrix units where the
    /// device has them, otherwise that of its 32-bit units.
    pub peak: BTreeMap<DType, Sourced<FlopRate>>,
    /// Highest rates of large products that were measured at the power limit, by operand type, where it keeps them far below the peaks.
    pub best_products: BTreeMap<DType, Sourced<FlopRate>>,
    /// Streaming multiprocessors or compute units.
    pub sm_count: u64,
    /// Power limit in watts, if stated.
    pub power_watts: Option<f64>,
    /// The clock that the peaks are stated for, in MHz, if known.
    pub clock_mhz: Option<f64>,
    /// Whether the driver lets devices reach each other's memory over PCI Express. NVIDIA's does not for GeForce cards.
    pub peers_over_pci_express: bool,
    /// Name of the measured kernel tables that price this device (its own or its nearest relative's).
    pub kernels: String,
}

/// Largest memory of one device, far above any that is made.
const MAX_MEMORY: Bytes = Bytes(1 << 50);
/// Largest memory bandwidth, far above any that is made.
const MAX_BANDWIDTH: Bandwidth = Bandwidth(1e16);
/// Largest rate of products, far above any that is made.
const MAX_RATE: FlopRate = FlopRate(1e19);

impl Device {
    /// Checks that its numbers are in range.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        above_zero(self.memory.value, MAX_MEMORY).map_err(|wrong| ("memory", wrong))?;
        above_zero(self.memory_bandwidth.value, MAX_BANDWIDTH)
            .map_err(|wrong| ("memory_bandwidth", wrong))?;
        for (dtype, rate) in &self.peak {
            above_zero(rate.value, MAX_RATE)
                .map_err(|wrong| ("peak", format!("{dtype:?} of {wrong}")))?;
        }
        for (dtype, rate) in &self.best_products {
            let peak = self.peak.get(dtype).map_or(MAX_RATE, |peak| peak.value);
            above_zero(rate.value, peak)
                .map_err(|wrong| ("best_products", format!("{dtype:?} of {wrong}")))?;
        }
        in_range(self.sm_count, 1..=1 << 16).map_err(|wrong| ("sm_count", wrong))?;
        let watts = self.power_watts.unwrap_or(1.0);
        in_range(watts, 1.0..=1e5).map_err(|wrong| ("power_watts", wrong))?;
        let clock = self.clock_mhz.unwrap_or(1.0);
        in_range(clock, 1.0..=1e5).map_err(|wrong| ("clock_mhz", wrong))
    }

    /// Whether the device computes products of this type. Matrix units for bf16 also take fp16, but
    /// not the reverse; every device computes with 32-bit and integer operands.
    #[must_use]
    pub fn has_units_for(&self, dtype: DType) -> bool {
        match dtype {
            DType::F16 => [DType::F16, DType::Bf16]
                .iter()
                .any(|d| self.peak.contains_key(d)),
            DType::F8 | DType::Bf16 | DType::F32 => self.peak.contains_key(&dtype),
            DType::I64 | DType::I32 | DType::U8 => true,
        }
    }

    /// Highest measured rate of products of this type; that of bf16 products over their peak times this type's peak if only bf16
    /// products were measured. `None` if no rate is stated.
    #[must_use]
    pub fn best_rate(&self, dtype: DType) -> Option<FlopRate> {
        let known = |dtype| self.best_products.get(&dtype).map(|rate| rate.value);
        known(dtype).or_else(|| {
            let share = known(DType::Bf16)? / self.peak.get(&DType::Bf16)?.value;
            Some(self.peak.get(&dtype)?.value * share)
        })
    }

    /// Dense peak for products of `dtype`, or else of a 16-bit type, or else of `f32`.
    #[must_use]
    pub fn peak_rate(&self, dtype: DType) -> Option<FlopRate> {
        let wider: &[DType] = match dtype {
            DType::F8 => &[DType::F8, DType::Bf16, DType::F16, DType::F32],
            DType::Bf16 => &[DType::Bf16, DType::F16, DType::F32],
            DType::F16 => &[DType::F16, DType::Bf16, DType::F32],
            DType::F32 | DType::I64 | DType::I32 | DType::U8 => &[DType::F32],
        };
        wider
            .iter()
            .find_map(|d| self.peak.get(d))
            .map(|rate| rate.value)
    }
}
