//! How a GPU's work is timed: between events in its stream, after a warm-up, for a limited time.

use std::time::{Duration, Instant};

use catalog::profile::{Kernel, Measured};
use cuda_device::{CudaError, Device};

use crate::ProfilerError;
use crate::lanes::{Effort, Laps, summarised};

/// Seconds recorded for an operator that ran no kernel, because it is fused with another.
pub(super) const NOTHING: f64 = 1e-9;
/// Least seconds between two marks, so that the cost of a mark is negligible.
const LAP: f64 = 1e-3;
/// Most calls between two marks.
const MOST_CALLS: u64 = 128;
/// Measuring time over warm-up time: the device is kept busy before a measurement until its clocks settle.
const WARMING: u32 = 4;
/// Bytes that the operands of consecutive calls are spread over: more than the L2 cache of any GPU (B200: 126 MB), so
/// that they come from memory, as most do in training.
const COLD: u64 = 256 << 20;
/// Most sets of operands.
const MOST_SETS: u64 = 8;

/// Time for all requests of a suite, divided among those that are left.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    whole: Duration,
    begun: Instant,
}

impl Budget {
    /// Starts the budget now.
    #[must_use]
    pub fn new(whole: Duration) -> Self {
        Self {
            whole,
            begun: Instant::now(),
        }
    }

    /// Time for each of the `left` measurements: an equal share of what is left, less the warm-up, and no longer than
    /// asked. Even with no time left, the fewest repetitions are made.
    #[must_use]
    pub fn share(&self, effort: Effort, left: usize) -> Effort {
        let rest = self.whole.saturating_sub(self.begun.elapsed());
        let each = rest / left.max(1) as u32 * WARMING / (WARMING + 1);
        Effort {
            time: effort.time.min(each),
            ..effort
        }
    }
}

/// Repeats work, after a warm-up, until enough was measured.
pub(super) fn repeat(
    effort: Effort,
    mut work: impl FnMut() -> Result<Laps, ProfilerError>,
) -> Result<Vec<Measured>, ProfilerError> {
    let start = Instant::now();
    loop {
        work()?;
        if start.elapsed() >= effort.time / WARMING {
            break;
        }
    }
    let start = Instant::now();
    let mut seen = Vec::new();
    while seen.len() < effort.least || (start.elapsed() < effort.time && seen.len() < effort.most) {
        seen.push(work()?);
    }
    Ok(summarised(&seen, 1))
}

/// Number of operand sets so that a call that touches `bytes` does not find them in a cache.
pub(super) fn sets(bytes: u64) -> usize {
    COLD.div_ceil(bytes.max(1)).clamp(1, MOST_SETS) as usize
}

/// Times what `call` queues; its argument is the number of calls before. The first kernel carries the time, and the
/// others, fused with it, none.
pub(super) fn timed(
    device: &Device,
    effort: Effort,
    kernels: &[Kernel],
    mut call: impl FnMut(usize) -> Result<(), CudaError>,
) -> Result<Vec<Measured>, ProfilerError> {
    let launcher = &device.launcher;
    call(0)?;
    launcher.mark()?;
    call(1)?;
    launcher.mark()?;
    let one = launcher.laps()?.iter().sum::<f64>().max(NOTHING);
    let calls = ((LAP / one) as u64).clamp(1, MOST_CALLS);
    let mut count = 2;
    repeat(effort, || {
        launcher.mark()?;
        for _ in 0..calls {
            call(count)?;
            count += 1;
        }
        launcher.mark()?;
        let lap = launcher.laps()?.iter().sum::<f64>().max(NOTHING);
        let mut laps = Laps::new();
        for (index, kernel) in kernels.iter().enumerate() {
            let seconds = if index == 0 {
                lap
            } else {
                NOTHING * calls as f64
            };
            laps.insert(kernel.clone(), (seconds, calls));
        }
        Ok(laps)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_shared_out() {
        let asked = Effort {
            time: Duration::from_secs(5),
            least: 3,
            most: 9,
        };
        let budget = Budget::new(Duration::from_secs(1000));
        assert_eq!(budget.share(asked, 10), asked);
        let share = budget.share(asked, 1000);
        let box_ms = 700..=800;
        assert!(box_ms.contains(&share.time.as_millis()), "{share:?}");
        let spent = Budget::new(Duration::ZERO).share(asked, 1);
        assert_eq!((spent.time, spent.least), (Duration::ZERO, 3));
    }

    #[test]
    fn small_operands_lie_in_several_sets() {
        for (bytes, want) in [(0, 8), (1 << 20, 8), (100 << 20, 3), (1 << 30, 1)] {
            assert_eq!(sets(bytes), want, "{bytes}");
        }
    }
}
