//! Runs the same work on several ranks side by side, repeatedly.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use catalog::profile::{Kernel, Measured};

use crate::ProfilerError;
use crate::visits::VISITS;

/// How long and how often to repeat a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Time for one visit; each measurement gets [`VISITS`] visits, spread over the profile.
    pub time: Duration,
    /// Fewest repetitions, after one that warms up.
    pub least: usize,
    /// Most repetitions.
    pub most: usize,
}

impl Effort {
    /// For a whole profile in a minute or two.
    pub const QUICK: Self = Self {
        time: Duration::from_millis(50),
        least: 2,
        most: 200,
    };
    /// For a whole profile in several minutes.
    pub const FULL: Self = Self {
        time: Duration::from_millis(500),
        least: 4,
        most: 2000,
    };
}

impl Effort {
    /// The effort of all [`VISITS`] in a single visit, for a device whose speed does not drift.
    #[must_use]
    pub fn at_once(self) -> Self {
        Self {
            time: self.time * VISITS as u32,
            least: self.least * VISITS,
            most: self.most,
        }
    }
}

/// For each kernel, seconds in one repetition on one rank and the number of runs they are the sum of.
pub(crate) type Laps = BTreeMap<Kernel, (f64, u64)>;

/// Makes a worker for every rank and runs them side by side until enough was measured.
pub(crate) fn measure<W>(
    ranks: u64,
    effort: Effort,
    make: impl Fn(usize) -> W + Sync,
    work: impl Fn(&mut W) -> Result<Laps, ProfilerError> + Sync,
) -> Result<Vec<Measured>, ProfilerError> {
    let barrier = Barrier::new(ranks as usize);
    let stop = AtomicBool::new(false);
    let failure: Mutex<Option<ProfilerError>> = Mutex::new(None);
    let poisoned = "no lane panics with the lock";
    let lane = |rank: usize| {
        let mut worker = make(rank);
        let mut seen: Vec<Laps> = Vec::new();
        let start = Instant::now();
        for repetition in 0.. {
            barrier.wait();
            match work(&mut worker) {
                // The first repetition warms up caches and the allocator.
                Ok(laps) if repetition > 0 => seen.push(laps),
                Ok(_) => {}
                Err(error) => {
                    failure.lock().expect(poisoned).get_or_insert(error);
                    stop.store(true, Ordering::SeqCst);
                }
            }
            let enough = repetition >= effort.least && start.elapsed() >= effort.time;
            if rank == 0 && (enough || repetition >= effort.most) {
                stop.store(true, Ordering::SeqCst);
            }
            barrier.wait();
            if stop.load(Ordering::SeqCst) {
                break;
            }
        }
        seen
    };
    let seen: Vec<Laps> = std::thread::scope(|scope| {
        let lane = &lane;
        let handles: Vec<_> = (0..ranks as usize)
            .map(|rank| scope.spawn(move || lane(rank)))
            .collect();
        handles
            .into_iter()
            .flat_map(|h| h.join().unwrap_or_default())
            .collect()
    });
    match failure.into_inner().expect(poisoned) {
        Some(error) => Err(error),
        None => Ok(summarised(&seen, ranks)),
    }
}

/// Mean time of a run for every kernel, without repetitions above three times the median.
pub(crate) fn summarised(seen: &[Laps], ranks: u64) -> Vec<Measured> {
    let mut times: BTreeMap<&Kernel, Vec<f64>> = BTreeMap::new();
    for laps in seen {
        for (kernel, (seconds, runs)) in laps {
            times
                .entry(kernel)
                .or_default()
                .push(seconds / *runs as f64);
        }
    }
    times
        .into_iter()
        .map(|(kernel, mut times)| {
            times.sort_by(f64::total_cmp);
            let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
            // A training step is a sum of kernels, so the mean counts; but interruptions by the rest of the machine do
            // not.
            let usual: Vec<f64> = times
                .iter()
                .copied()
                .filter(|t| *t <= 3.0 * at(0.5))
                .collect();
            let seconds = (usual.iter().sum::<f64>() / usual.len() as f64).max(1e-9);
            Measured {
                kernel: kernel.name.clone(),
                sizes: kernel.sizes.clone(),
                ranks,
                seconds,
                spread: (at(0.75) - at(0.25)) / 2.0 / seconds,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort {
        time: Duration::ZERO,
        least: 3,
        most: 3,
    };

    #[test]
    fn repetitions_become_medians_per_run() {
        let kernel = Kernel::new("k", [2u64]);
        let measured = measure(
            2,
            EFFORT,
            |_| 0.0,
            |clock: &mut f64| {
                *clock += 1.0;
                Ok(Laps::from([(kernel.clone(), (2.0 * *clock, 2))]))
            },
        )
        .expect("measures");
        // Repetitions 2, 3 and 4 of both ranks count.
        assert_eq!(measured.len(), 1);
        assert_eq!((measured[0].seconds, measured[0].ranks), (3.0, 2));
    }

    #[test]
    fn one_failing_rank_stops_all() {
        let result = measure(
            3,
            EFFORT,
            |rank| rank,
            |rank: &mut usize| match *rank {
                1 => Err(ProfilerError::NotFinite {
                    kernel: "k".to_owned(),
                    value: f32::NAN,
                }),
                _ => Ok(Laps::new()),
            },
        );
        assert!(result.is_err());
    }
}
