//! Accelerators, as data.

use std::collections::BTreeMap;

use crate::dtype::DType;
use crate::provenance::Sourced;
use crate::units::{Bandwidth, Bytes, FlopRate};

/// Microarchitecture: decides which kernels exist.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
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
    /// MI300X and later.
    Cdna3,
    /// A CPU of this machine.
    Cpu,
}

/// A resolved accelerator.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Preset name, such as `h100-sxm`.
    pub name: String,
    /// Microarchitecture.
    pub architecture: Architecture,
    /// Memory that the framework sees (`torch` total, less than the label).
    pub memory: Sourced<Bytes>,
    /// Peak memory bandwidth.
    pub memory_bandwidth: Sourced<Bandwidth>,
    /// Dense peaks of the matrix units per operand type.
    pub peak: BTreeMap<DType, Sourced<FlopRate>>,
    /// Streaming multiprocessors or compute units.
    pub sm_count: u64,
    /// Power limit in watts, if stated.
    pub power_watts: Option<f64>,
    /// Name of the measured kernel tables that price this device (its own or its nearest relative's).
    pub kernels: String,
}

impl Device {
    /// Dense peak for products of `dtype`; falls back to the next wider type that has one.
    #[must_use]
    pub fn peak_rate(&self, dtype: DType) -> Option<FlopRate> {
        let wider: &[DType] = match dtype {
            DType::F8 => &[DType::F8, DType::Bf16, DType::F16, DType::F32],
            DType::Bf16 | DType::F16 => &[dtype, DType::F16, DType::F32],
            DType::F32 | DType::I64 | DType::I32 | DType::U8 => &[DType::F32],
        };
        wider
            .iter()
            .find_map(|d| self.peak.get(d))
            .map(|rate| rate.value)
    }
}
