//! Kernels that are priced for one GPU and were measured on another.
//!
//! A kernel's time has two parts: its operations at the peak rate of the matrix units, and everything that they wait for, such
//! as launches, loads and the last tiles. The first part follows the peaks. The second follows the number of multiprocessors
//! and their clock. The two differ where a GPU has slower matrix units at the same clock, as GeForce cards and others made
//! for workstations or for export have: there only the operations take longer, so these GPUs come closer to their peak. An H20
//! multiplies at 96% of it, an H100 at 81% (best_squares.csv).

use catalog::tables::MeasuredOn;
use catalog::{Architecture, DType, Device, Seconds};

use crate::known;

/// How much longer the two parts of a kernel's time are on the GPU that is priced than on the measured one.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlowerUnits {
    /// Operations at the peak.
    operations: f64,
    /// Everything else.
    rest: f64,
}

impl SlowerUnits {
    /// `None` if matrix units are not slower than those of the measured GPU but for their clock, if the clock is not known, or if
    /// the measured GPU is of a generation whose multiprocessors are different.
    pub(super) fn of(device: &Device, measured: &MeasuredOn) -> Option<Self> {
        match device.architecture {
            Architecture::Ampere
            | Architecture::Ada
            | Architecture::Hopper
            | Architecture::Blackwell
            | Architecture::BlackwellRtx => {}
            Architecture::Volta | Architecture::Cdna3 | Architecture::Cpu => return None,
        }
        let multiprocessors = measured.multiprocessors as f64 / device.sm_count as f64;
        let slower = Self {
            operations: measured.peak.value / device.peak_rate(DType::Bf16)?,
            rest: multiprocessors * measured.clock_mhz / device.clock_mhz?,
        };
        (slower.operations > slower.rest * known::SLOWER_UNITS.factor()).then_some(slower)
    }

    /// The time of a kernel that took `measured`, of which its operations at the measured GPU's peak are `at_peak`.
    pub(super) fn time(self, measured: Seconds, at_peak: Seconds) -> Seconds {
        let rest = (measured - at_peak).max(Seconds(0.0));
        at_peak * self.operations + rest * self.rest
    }
}
