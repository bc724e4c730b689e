//! Measurements that a profile lacks are made, once, and failures are reported; a counting meter
//! stands in for a GPU.

use std::time::Duration;

use catalog::profile::{Gpu, Kernel, Machine, Measured, Profile};
use cuda_device::CudaError;
use profiler::cuda::{Asked, Budget, Meter, complete};
use profiler::{Effort, ProfilerError};

/// A request: sizes of the kernel `k`, and the error with which it ends, if any.
#[derive(Clone)]
struct Sizes(Vec<u64>, Option<ProfilerError>);

impl Asked for Sizes {
    fn kernels(&self) -> Vec<Kernel> {
        self.0.iter().map(|&n| Kernel::new("k", [n])).collect()
    }
    fn parts(&self) -> usize {
        self.0.len()
    }
    fn described(&self) -> String {
        format!("{:?}", self.0)
    }
}

#[derive(Default)]
struct Counter {
    measured: Vec<Vec<u64>>,
    shares: Vec<Duration>,
}

impl Meter for Counter {
    type Asked = Sizes;

    fn measure(&mut self, asked: &Sizes, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
        if let Some(error) = &asked.1 {
            return Err(error.clone());
        }
        self.measured.push(asked.0.clone());
        self.shares.push(effort.time);
        let seconds = self.measured.len() as f64;
        Ok(asked.0.iter().map(|&n| entry(n, seconds)).collect())
    }

    fn machine(&self) -> Machine {
        machine(1, self.measured.len() as u32)
    }
}

fn entry(size: u64, seconds: f64) -> Measured {
    Measured {
        kernel: "k".to_owned(),
        sizes: vec![size],
        ranks: 1,
        seconds,
        spread: 0.0,
    }
}

fn machine(count: u64, clock: u32) -> Machine {
    Machine {
        processor: "a GPU".to_owned(),
        cores: 1,
        memory_bytes: 1,
        gpu: Some(Gpu {
            count,
            clock_mhz: Some([clock; 2]),
            ..Gpu::default()
        }),
    }
}

fn profile(held: &[(u64, f64)]) -> Profile {
    Profile {
        schema_version: 1,
        tool_version: String::new(),
        machine: machine(8, 0),
        measured: held.iter().map(|&(n, seconds)| entry(n, seconds)).collect(),
    }
}

const FULL: ProfilerError = ProfilerError::Cuda(CudaError::OutOfMemory {
    asked: 1,
    live: 0,
    free: 0,
});

#[test]
fn a_profile_is_completed() {
    let ask = |sizes: &[u64]| Sizes(sizes.to_vec(), None);
    // Sizes that the profile holds, requests, which of them are measured, and what the profile says then.
    type Case = (
        &'static [(u64, f64)],
        Vec<Sizes>,
        &'static [&'static [u64]],
        &'static [(u64, f64)],
    );
    let cases: [Case; 3] = [
        (
            &[],
            vec![ask(&[1, 2]), ask(&[3])],
            &[&[1, 2], &[3]],
            &[(1, 1.0), (2, 1.0), (3, 2.0)],
        ),
        // Begun before: what is whole is left alone, what is half there is completed and not replaced.
        (
            &[(1, 9.0), (2, 9.0), (3, 9.0)],
            vec![ask(&[1, 2]), ask(&[3, 4])],
            &[&[3, 4]],
            &[(1, 9.0), (2, 9.0), (3, 9.0), (4, 1.0)],
        ),
        // Asked for twice.
        (&[], vec![ask(&[5]), ask(&[5])], &[&[5]], &[(5, 1.0)]),
    ];
    for (held, requests, measured, wanted) in cases {
        let mut profile = profile(held);
        let mut meter = Counter::default();
        let mut shares = Vec::new();
        let effort = Effort {
            time: Duration::from_secs(1),
            least: 1,
            most: 1,
        };
        let budget = Budget::new(Duration::from_secs(1 << 20));
        let left_out = complete(
            &mut meter,
            &mut profile,
            &requests,
            (budget, effort),
            |s, _| {
                shares.push(s);
                Ok::<(), ProfilerError>(())
            },
        );
        assert_eq!(left_out, Ok(Vec::new()));
        assert_eq!(meter.measured, measured);
        let now: Vec<(u64, f64)> = profile
            .measured
            .iter()
            .map(|m| (m.sizes[0], m.seconds))
            .collect();
        assert_eq!(now, wanted);
        assert_eq!(shares.last(), Some(&1.0));
        assert!(shares.is_sorted());
        // Enough time for all: every box is as long as asked.
        assert!(meter.shares.iter().all(|&share| share == effort.time));
        // As many GPUs as were ever measured together; clocks of this time.
        assert_eq!(profile.machine, machine(8, measured.len() as u32));
    }
}

#[test]
fn what_memory_does_not_hold_is_left_out_and_other_failures_end_it() {
    let wrong = ProfilerError::Wrong {
        kernel: "k".to_owned(),
        element: 0,
        got: 1.0,
        want: 2.0,
    };
    for (failure, wanted) in [
        (FULL, Ok(vec!["[7]".to_owned()])),
        (wrong.clone(), Err(wrong)),
    ] {
        let mut profile = profile(&[]);
        let requests = [Sizes(vec![7], Some(failure)), Sizes(vec![8], None)];
        let time = (Budget::new(Duration::ZERO), Effort::QUICK);
        let after = |_, _: &Profile| Ok::<(), ProfilerError>(());
        let result = complete(
            &mut Counter::default(),
            &mut profile,
            &requests,
            time,
            after,
        );
        assert_eq!(profile.measured.len(), usize::from(wanted.is_ok()));
        assert_eq!(result, wanted);
    }
}
