//! Tables of measured kernels and collectives, shared by profiler, presets and cost model.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use ndarray::Array3;
use serde::Deserialize;
use strum::EnumString;

use crate::dtype::DType;
use crate::provenance::Sourced;
use crate::units::{Bandwidth, FlopRate};

/// Measured matrix products on a regular grid, logarithmic in every dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmGrid {
    /// Grid points of `m`, `n` and `k`, ascending.
    pub sizes: [Vec<u64>; 3],
    /// Times in microseconds by `[m, n, k]`.
    pub microseconds: Array3<f64>,
}

/// A fit of a one-node collective's time: `a + b·√MB + bytes·busfactor/rate`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CollectiveFit {
    /// Number of ranks that were measured.
    pub ranks: u64,
    /// The collective operation.
    pub op: CollectiveOp,
    /// Constant part of the time, in microseconds.
    pub a: f64,
    /// Time in microseconds per square root of a megabyte.
    pub b: f64,
    /// Bus bandwidth for infinitely large messages, GB/s.
    pub rate: f64,
    /// Mean absolute relative error of the fit at 8 MB and more.
    pub error: f64,
}

/// Collective operations that have tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum CollectiveOp {
    /// Every rank ends with the whole sum.
    AllReduce,
    /// Every rank ends with all ranks' shards.
    AllGather,
    /// Every rank ends with its own shard of the sum.
    ReduceScatter,
    /// Every rank sends a different part to every other.
    AllToAll,
}

/// Names and texts of the GEMM tables; `Device::kernels` is one of these names.
const GEMM: &[(&str, &str)] = &[
    (
        "a100_sxm",
        include_str!("../presets/kernels/gemm_a100_sxm.csv"),
    ),
    (
        "h100_sxm",
        include_str!("../presets/kernels/gemm_h100_sxm.csv"),
    ),
    (
        "h200_sxm",
        include_str!("../presets/kernels/gemm_h200_sxm.csv"),
    ),
    (
        "b200_sxm",
        include_str!("../presets/kernels/gemm_b200_sxm.csv"),
    ),
    (
        "b300_sxm",
        include_str!("../presets/kernels/gemm_b300_sxm.csv"),
    ),
    ("gb200", include_str!("../presets/kernels/gemm_gb200.csv")),
    ("gb300", include_str!("../presets/kernels/gemm_gb300.csv")),
    ("l40s", include_str!("../presets/kernels/gemm_l40s.csv")),
    (
        "rtx_pro_6000_server",
        include_str!("../presets/kernels/gemm_rtx_pro_6000_server.csv"),
    ),
];

const MEASURED_ON: &str = include_str!("../presets/kernels/measured_on.yaml");

/// The GPU that a table was measured on.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredOn {
    /// Dense peak in 16 bits. Every GPU with an 8-bit table is twice as fast in 8 bits.
    pub peak: Sourced<FlopRate>,
    /// Power limit in watts.
    pub power_watts: f64,
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
    /// The clock that its peak is stated for, in MHz.
    pub clock_mhz: f64,
    /// Bandwidth of its links to the other GPUs of its domain, per direction.
    pub scale_up: Sourced<Bandwidth>,
}

impl MeasuredOn {
    /// Power limit over peak, in watts per FLOP/s.
    #[must_use]
    pub fn power_over_peak(&self) -> f64 {
        self.power_watts / self.peak.value.0
    }
}

/// The GPU that a table was measured on; `None` if there is no such table.
///
/// # Panics
/// Never: a test parses the embedded file.
#[must_use]
pub fn measured_on(table: &str) -> Option<&'static MeasuredOn> {
    static PARTS: OnceLock<BTreeMap<String, MeasuredOn>> = OnceLock::new();
    let parts = PARTS.get_or_init(|| {
        let parts = crate::text::yaml(MEASURED_ON, "measured_on.yaml");
        parts.expect("the embedded file is well-formed, a test shows")
    });
    parts.get(table)
}

const ONE_NODE: &str = include_str!("../presets/collectives/one_node.csv");

/// The table of one-node collectives of a host whose GPUs reach each other over PCI Express alone.
pub const OVER_PCI_EXPRESS: &str = "rtx_pro_6000_server";

/// The best rate of square products that short runs measured on a GPU, which checks its prices.
#[derive(Clone, Debug, PartialEq)]
pub struct BestSquare {
    /// Name of the GPU's preset.
    pub device: String,
    /// Number of machines that were measured.
    pub machines: u64,
    /// Rate of the slowest machine, TFLOP/s.
    pub lowest: f64,
    /// Rate of the fastest machine, TFLOP/s.
    pub highest: f64,
}

/// Sizes of the square products whose best rate [`best_squares`] gives.
pub const SQUARES: [u64; 5] = [1024, 2048, 4096, 8192, 10_240];

const BEST_SQUARES: &str = include_str!("../presets/kernels/best_squares.csv");

/// Measured rates of square products, from a source that no table comes from.
#[must_use]
pub fn best_squares() -> Vec<BestSquare> {
    let lines = BEST_SQUARES.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let [device, machines, lowest, highest] = cells.as_slice() else {
                return None;
            };
            Some(BestSquare {
                device: (*device).to_owned(),
                machines: machines.parse().ok()?,
                lowest: lowest.parse().ok()?,
                highest: highest.parse().ok()?,
            })
        })
        .collect()
}

/// Names of the GEMM tables.
pub fn gemm_names() -> impl Iterator<Item = &'static str> {
    GEMM.iter().map(|(name, _)| *name)
}

/// The measured products of a table for an element type; `None` if there are none.
#[must_use]
pub fn gemm(device: &str, dtype: DType) -> Option<GemmGrid> {
    let text = GEMM.iter().find(|(name, _)| *name == device)?.1;
    let wanted = match dtype {
        DType::Bf16 | DType::F16 => "bf16",
        DType::F8 => "f8",
        DType::F32 | DType::I64 | DType::I32 | DType::U8 => return None,
    };
    let header = text.lines().find_map(|line| line.split_once("for k = "))?;
    let k: Vec<u64> = header
        .1
        .split_whitespace()
        .map_while(|v| v.parse().ok())
        .collect();
    let (mut rows, mut columns, mut microseconds) = (Vec::new(), Vec::new(), Vec::new());
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut cells = line.split(',');
        if cells.next() != Some(wanted) {
            continue;
        }
        let m: u64 = cells.next()?.parse().ok()?;
        let n: u64 = cells.next()?.parse().ok()?;
        if rows.last() != Some(&m) {
            rows.push(m);
        }
        if rows.len() == 1 {
            columns.push(n);
        }
        microseconds.extend(cells.filter_map(|c| c.parse::<f64>().ok()));
    }
    let shape = (rows.len(), columns.len(), k.len());
    Some(GemmGrid {
        sizes: [rows, columns, k],
        microseconds: Array3::from_shape_vec(shape, microseconds).ok()?,
    })
    .filter(|grid| !grid.microseconds.is_empty())
}

/// The fits of a device's one-node collectives, for all operations and numbers of ranks.
#[must_use]
pub fn one_node_collectives(device: &str) -> Vec<CollectiveFit> {
    ONE_NODE
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let [name, ranks, op, a, b, rate, error] = cells.as_slice() else {
                return None;
            };
            if *name != device {
                return None;
            }
            Some(CollectiveFit {
                ranks: ranks.parse().ok()?,
                op: op.parse().ok()?,
                a: a.parse().ok()?,
                b: b.parse().ok()?,
                rate: rate.parse().ok()?,
                error: error.parse().ok()?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Axis;

    #[test]
    fn every_table_is_whole_and_monotone() {
        for name in gemm_names() {
            assert!(
                measured_on(name).is_some(),
                "{name}: not in measured_on.yaml"
            );
            let grid = gemm(name, DType::Bf16).expect(name);
            for axis in [Axis(0), Axis(1), Axis(2)] {
                for line in grid.microseconds.lanes(axis) {
                    assert!(
                        line.windows(2).into_iter().all(|w| w[0] <= w[1]),
                        "{name} {line}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_node_size_has_all_four_operations() {
        // L40S has no table of its own: its GPUs are on PCI Express.
        let over_nvlink = gemm_names().filter(|name| *name != "l40s");
        for name in over_nvlink.chain([OVER_PCI_EXPRESS]) {
            let fits = one_node_collectives(name);
            assert!(!fits.is_empty(), "{name}");
            assert_eq!(fits.len() % 4, 0, "{name}");
        }
    }
}
