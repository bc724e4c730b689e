//! Measures a rank's work outside blocks: the optimizer, copies, messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use catalog::DType;
use catalog::profile::{Kernel, Measured};
use comm::local::{self, LocalCommunicator};
use comm::{Communicator, Group, pack, unpack};
use cpu_device::{AdamWStep, ExactSum, Tensor, Weights, adamw};

use crate::ProfilerError;
use crate::lanes::{Effort, Laps, measure};

/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Barriers in one repetition.
const BARRIERS: u64 = 32;

/// Measures the optimizer, the gradient norm and copies over this many elements.
///
/// # Errors
/// None: the work of its ranks does not fail.
pub fn states(elements: u64, ranks: u64, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
    let n = elements as usize;
    let make = |_| [vec![0.1f32; n], vec![0.0; n], vec![0.0; n], vec![0.01; n]];
    measure(ranks, effort, make, |buffers| {
        let mut laps = Laps::new();
        let mut time = |name: &str, work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            let seconds = start.elapsed().as_secs_f64();
            laps.insert(Kernel::new(name, [elements]), (seconds, 1));
        };
        let [master, momentum, variance, gradient] = buffers;
        time("adamw", &mut || {
            let mut weights = Weights {
                master,
                momentum,
                variance,
                gradient,
            };
            adamw(&mut weights, &STEP, 1.0);
        });
        time("gradient norm", &mut || {
            let mut sum = ExactSum::default();
            for &g in gradient.iter() {
                sum.add(f64::from(g) * f64::from(g));
            }
            std::hint::black_box(sum.value());
        });
        time("copy", &mut || {
            std::hint::black_box(master.clone());
        });
        Ok(laps)
    })
}

/// A step of the optimizer, as both devices are measured with.
pub(crate) const STEP: AdamWStep = AdamWStep {
    rate: 1e-4,
    betas: [0.9, 0.95],
    corrections: [0.1, 0.05],
    epsilon: 1e-8,
    keep: 0.9999,
};

/// Measures messages of this many elements between `ranks` ranks, and their barrier.
///
/// # Errors
/// When ranks cannot communicate.
pub fn messages(elements: u64, ranks: u64, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
    let world = local::world(ranks as usize, TIMEOUT);
    let n = elements as usize;
    let make = |rank: usize| {
        let group = Group {
            ranks: (0..ranks as usize).collect(),
            index: rank,
            channel: 1,
        };
        (world[rank].clone(), group, vec![rank as f32; n])
    };
    measure(ranks, effort, make, |(comm, group, data)| {
        let comm: &LocalCommunicator = comm;
        let mut laps = Laps::new();
        let start = Instant::now();
        for _ in 0..BARRIERS {
            group.barrier(comm)?;
        }
        let met = start.elapsed().as_secs_f64();
        laps.insert(Kernel::new("barrier", [ranks]), (met, BARRIERS));
        let mut time = |name: &str, run: &mut dyn FnMut() -> Result<(), ProfilerError>| {
            group.barrier(comm)?;
            let start = Instant::now();
            run()?;
            let seconds = start.elapsed().as_secs_f64();
            laps.insert(Kernel::new(name, [ranks, elements]), (seconds, 1));
            Ok::<(), ProfilerError>(())
        };
        time("all-reduce", &mut || {
            Ok(group.all_reduce(comm, "profile", &mut data.clone())?)
        })?;
        time("reduce-scatter", &mut || {
            std::hint::black_box(group.reduce_scatter(comm, "profile", data)?);
            Ok(())
        })?;
        let shard = &data[..n.div_ceil(ranks as usize)];
        time("all-gather", &mut || {
            let parts = group.all_gather(comm, "profile", pack(shard))?.wait(comm)?;
            let pieces = parts.iter().map(|part| part.as_slice());
            let len = parts.iter().map(|part| part.len() / 4).sum();
            std::hint::black_box(Tensor::from_pieces(vec![len], pieces, DType::F32));
            Ok(())
        })?;
        // Round the ring: everyone sends to the next and receives from the one before.
        let size = group.size();
        let (next, before) = ((group.index + 1) % size, (group.index + size - 1) % size);
        time("send and receive", &mut || {
            comm.send(next, 9, "profile", Arc::new(pack(data).to_vec()))?;
            std::hint::black_box(unpack(&comm.receive(before, 9, "profile")?));
            Ok(())
        })?;
        Ok(laps)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort {
        time: Duration::ZERO,
        least: 2,
        most: 2,
    };

    #[test]
    fn every_primitive_is_measured() {
        let names = |measured: Vec<Measured>| -> Vec<String> {
            assert!(measured.iter().all(|m| m.seconds > 0.0));
            measured.into_iter().map(|m| m.kernel).collect()
        };
        assert_eq!(
            names(states(1000, 2, EFFORT).expect("measures")),
            ["adamw", "copy", "gradient norm"]
        );
        assert_eq!(
            names(messages(1000, 4, EFFORT).expect("measures")),
            [
                "all-gather",
                "all-reduce",
                "barrier",
                "reduce-scatter",
                "send and receive"
            ]
        );
    }
}
