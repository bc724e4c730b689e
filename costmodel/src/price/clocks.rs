//! Factors for the clocks of real training: sustained instead of boost, and under a lower power limit.

use catalog::fitted::Constant;
use catalog::tables::MeasuredOn;
use catalog::{Architecture, DType, Device, Fitted, elementary};

use super::borrowed::SlowerUnits;
use crate::known;

/// Time of kernels in long training over that in short benchmarks, which run at boost clocks. A part with more power for its
/// peak than the one that was measured is throttled less. Where the best rate at the power limit was measured, it says all.
pub(crate) fn sustained(device: &Device, table: &MeasuredOn, fitted: &Fitted) -> f64 {
    if device.best_rate(DType::Bf16).is_some() {
        return 1.0;
    }
    let measured = match device.architecture {
        Architecture::Hopper | Architecture::Blackwell => fitted.get(Constant::TrainingTime),
        Architecture::Ampere => known::AMPERE_SUSTAINED.factor(),
        Architecture::Volta
        | Architecture::Ada
        | Architecture::BlackwellRtx
        | Architecture::Cdna3
        | Architecture::Cpu => known::OTHER_SUSTAINED.factor(),
    };
    throttled(measured, device, table)
}

/// The factor that is left of `slowdown` on a part with more power for its peak; at least 1.
pub(crate) fn throttled(slowdown: f64, device: &Device, table: &MeasuredOn) -> f64 {
    (slowdown / headroom(device, table)).max(1.0)
}

/// The highest clock that a part's power allows, over that of the table's part; at least 1. It is 1
/// on Volta, CDNA 3 and CPUs: the power of a table's part of another process says nothing there.
pub(crate) fn headroom(device: &Device, table: &MeasuredOn) -> f64 {
    match device.architecture {
        Architecture::Ampere
        | Architecture::Ada
        | Architecture::Hopper
        | Architecture::Blackwell
        | Architecture::BlackwellRtx => follow(1.0 / less_power(device, table)),
        Architecture::Volta | Architecture::Cdna3 | Architecture::Cpu => 1.0,
    }
}

/// How much longer matrix kernels take on a part with less power for its peak than the table's part has: dynamic power grows
/// with `f·V²` and voltage nearly with frequency, so the sustained clock follows the power to an exponent below one. With
/// more power for its peak than that, a part runs at the clocks of its datasheet. Neither more power nor a higher peak ever
/// makes a kernel slower.
pub(crate) fn clock_factor(device: &Device, table: &MeasuredOn) -> f64 {
    follow(less_power(device, table))
}

/// Watts per FLOP/s of peak of the table's part, over those of this device; 1 if the device's power
/// is unknown. Consumer parts of Ampere are compared with the watts that full clocks need
/// ([`known::AMPERE_RTX_POWER`]) instead of the table's.
fn less_power(device: &Device, table: &MeasuredOn) -> f64 {
    let own = device.peak_rate(DType::Bf16).map_or(0.0, |rate| rate.0);
    let Some(watts) = device.power_watts.filter(|&watts| watts > 0.0) else {
        return 1.0;
    };
    match device.architecture {
        // GeForce cards, RTX A6000, A10 and A40 are of another process than A100.
        Architecture::Ampere if SlowerUnits::of(device, table).is_some() => {
            known::AMPERE_RTX_POWER.watts_per_teraflop() * own / 1e12 / watts
        }
        _ => table.power_watts / watts * (own / table.peak.value.0),
    }
}

/// Factor by which kernels take longer if full clocks need `less` times the power that the GPU has;
/// 1 if they need no more than that.
fn follow(less: f64) -> f64 {
    elementary::powf(less.max(1.0), known::CLOCK_EXPONENT.factor())
}
