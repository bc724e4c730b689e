//! Factors for the clocks of real training: sustained instead of boost, and under a lower power limit.

use catalog::fitted::Constant;
use catalog::tables::MeasuredOn;
use catalog::{Architecture, DType, Device, Fitted, elementary};

use super::borrowed::SlowerUnits;
use crate::known;

/// Time of kernels in long training over that in short benchmarks, which run at boost clocks. A part with more power for its
/// peak than the one that was measured is throttled less.
pub(crate) fn sustained(device: &Device, table: &MeasuredOn, fitted: &Fitted) -> f64 {
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

/// What becomes of a slowdown by throttling on a part with more power for its peak.
pub(crate) fn throttled(slowdown: f64, device: &Device, table: &MeasuredOn) -> f64 {
    (slowdown / headroom(device, table)).max(1.0)
}

/// The highest clock that a part's power allows over that of the table's part, at least 1. It is 1 where the table is of another
/// process, whose power says nothing.
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

/// How many times less power for its peak a part has than the table's part; 1 if its power is not known. Where the table's part is of
/// another process, it is compared with the power that full clocks need.
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

/// How much longer kernels take with so many times less power than full clocks need.
fn follow(less: f64) -> f64 {
    elementary::powf(less.max(1.0), known::CLOCK_EXPONENT.factor())
}
