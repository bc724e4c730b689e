//! How much longer kernels take than tables say: clocks in long training, and under a lower power limit.

use catalog::fitted::Constant;
use catalog::{Architecture, DType, Device, Fitted, FlopRate};

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

/// How much longer matrix kernels take than the ratio of datasheet peaks says on a part with a lower
/// power limit than the table's: dynamic power grows with `f·V²` and voltage nearly with frequency, so
/// the sustained clock follows the power limit to a power below one. A part whose peak is lower runs at
/// lower clocks already; only what its power takes beyond that counts, so that neither more power nor a
/// higher peak ever makes a kernel slower.
pub(crate) fn clock_factor(device: &Device, fitted: &Fitted) -> f64 {
    let own = device.peak_rate(DType::Bf16).map_or(0.0, |rate| rate.0);
    let share = own / reference_peak(&device.kernels, DType::Bf16).0;
    match device.power_watts {
        Some(watts) if watts > 0.0 => {
            let slower = (reference_watts(&device.kernels) / watts)
                .max(1.0)
                .powf(fitted.get(Constant::ClockExponent));
            (slower * share.min(1.0)).max(1.0)
        }
        _ => 1.0,
    }
}

/// Dense peak of the device a table was measured on (vendor datasheets).
pub(crate) fn reference_peak(table: &str, dtype: DType) -> FlopRate {
    let bf16 = match table {
        "a100_sxm" => 312e12,
        "b200_sxm" | "b300_sxm" => 2250e12,
        "gb200" | "gb300" => 2500e12,
        "l40s" => 362e12,
        _ => 989e12,
    };
    FlopRate(if dtype == DType::F8 { 2.0 * bf16 } else { bf16 })
}
