//! Factors for the clocks of real training: sustained instead of boost, and under a lower power limit.

use catalog::fitted::Constant;
use catalog::tables::MeasuredOn;
use catalog::{Architecture, DType, Device, Fitted, elementary};

use crate::known;

/// Time of kernels in long training over that in short benchmarks, which run at boost clocks.
pub(crate) fn sustained(architecture: Architecture, fitted: &Fitted) -> f64 {
    match architecture {
        Architecture::Hopper | Architecture::Blackwell => fitted.get(Constant::TrainingTime),
        Architecture::Ampere => known::AMPERE_SUSTAINED.factor(),
        Architecture::Volta
        | Architecture::Ada
        | Architecture::BlackwellRtx
        | Architecture::Cdna3
        | Architecture::Cpu => known::OTHER_SUSTAINED.factor(),
    }
}

/// How much longer matrix kernels take than the ratio of datasheet peaks says on a part with a lower
/// power limit than the table's: dynamic power grows with `f·V²` and voltage nearly with frequency, so
/// the sustained clock follows the power limit to a power below one. A part whose peak is lower runs at
/// lower clocks already; only what its power takes beyond that counts, so that neither more power nor a
/// higher peak ever makes a kernel slower.
pub(crate) fn clock_factor(device: &Device, table: &MeasuredOn) -> f64 {
    let own = device.peak_rate(DType::Bf16).map_or(0.0, |rate| rate.0);
    let share = own / table.peak.value.0;
    match device.power_watts {
        Some(watts) if watts > 0.0 => {
            let less = (table.power_watts / watts).max(1.0);
            let slower = elementary::powf(less, known::CLOCK_EXPONENT.factor());
            (slower * share.min(1.0)).max(1.0)
        }
        Some(_) | None => 1.0,
    }
}
