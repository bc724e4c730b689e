//! Measures exchanges between devices whose messages pass through the host. Each moves the right
//! numbers, is timed by all ranks, and is refused if numbers do not arrive.

#[path = "../../devices/cuda/tests/cuda/emulator.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod emulator;

use std::rc::Rc;
use std::time::Duration;

use catalog::profile::{Gpu, Kernel, Machine, Profile};
use comm::{Communicator, Group, local};
use cuda_device::{CudaError, Device, HostLinks, Links, Tensor};
use profiler::cuda::{
    Asked, Budget, COLLECTIVES, Collective, Exchange, Fleet, Meter, Peers, Rank, complete, follow,
    with_fleet,
};
use profiler::{Effort, ProfilerError};

const EFFORT: Effort = Effort {
    time: Duration::ZERO,
    least: 2,
    most: 2,
};

/// A device in host memory, which runs no kernels.
struct HostRank {
    device: Device,
    deaf: bool,
}

struct HostPeers {
    device: Device,
    group: Group,
    deaf: bool,
}

impl Rank for HostRank {
    fn device(&self) -> &Device {
        &self.device
    }

    fn join(
        &self,
        comm: &dyn Communicator,
        group: &Group,
    ) -> Result<Box<dyn Peers>, ProfilerError> {
        group.barrier(comm)?;
        Ok(Box::new(HostPeers {
            device: self.device.clone(),
            group: group.clone(),
            deaf: self.deaf,
        }))
    }
}

impl HostPeers {
    fn parts(&self, whole: &Tensor) -> Vec<Tensor> {
        let len = whole.len() / self.group.size();
        let part = |i: usize| whole.part(i * len, vec![len]);
        (0..self.group.size()).map(part).collect()
    }

    fn carry(
        &self,
        comm: &dyn Communicator,
        collective: Collective,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<(), CudaError> {
        let links = HostLinks::new(self.device.clone(), comm);
        let (group, size) = (&self.group, self.group.size());
        let one = |x: &Tensor| vec![x.clone()];
        let (kind, from, to) = match collective {
            Collective::AllReduce => (cuda_device::Collective::AllReduce, one(from), one(to)),
            Collective::AllGather => (
                cuda_device::Collective::AllGather,
                one(from),
                self.parts(to),
            ),
            Collective::ReduceScatter => (
                cuda_device::Collective::ReduceScatter,
                self.parts(from),
                one(to),
            ),
            Collective::AllToAll => (
                cuda_device::Collective::AllToAll,
                self.parts(from),
                self.parts(to),
            ),
            Collective::Broadcast => {
                // The gathered part of the first rank.
                let spare = |_: usize| self.device.tensor(vec![to.len()], to.dtype);
                let mut all: Vec<Tensor> = (0..size).map(spare).collect::<Result<_, _>>()?;
                all[0] = to.clone();
                (cuda_device::Collective::AllGather, one(from), all)
            }
            Collective::SendAndReceive => {
                let peer = |shift: usize| group.ranks[(group.index + shift) % size];
                let sending = links.send(peer(1), 99, "test", from)?;
                links.receive(peer(size - 1), 99, "test", to)?;
                return links.wait(sending);
            }
        };
        links.exchange(kind, group, "test", &from, &to)
    }
}

impl Peers for HostPeers {
    fn exchange(
        &self,
        comm: &dyn Communicator,
        collective: Collective,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<(), ProfilerError> {
        if self.deaf {
            let spare = self.device.tensor(vec![to.len()], to.dtype)?;
            return Ok(self.carry(comm, collective, from, &spare)?);
        }
        Ok(self.carry(comm, collective, from, to)?)
    }

    fn finish(&self, _: &dyn Communicator) -> Result<(), ProfilerError> {
        Ok(self.device.launcher.synchronize()?)
    }
}

fn machine(count: u64) -> Machine {
    Machine {
        processor: "a GPU".to_owned(),
        cores: 1,
        memory_bytes: 1,
        gpu: Some(Gpu {
            count,
            ..Gpu::default()
        }),
    }
}

fn open(deaf: bool) -> HostRank {
    HostRank {
        device: Device::new(Rc::new(emulator::Emulator::default())),
        deaf,
    }
}

/// Groups of all ranks, of two pairs (of five ranks the last one waits), and of odd sizes; messages
/// that divide evenly or not, and some longer than the pattern that fills them.
#[test]
fn exchanges_are_right_and_measured() {
    for (ranks, groups) in [(4, &[2, 4][..]), (5, &[2, 5]), (3, &[3])] {
        let mut requests = Vec::new();
        for &collective in COLLECTIVES {
            for &ranks in groups {
                let of = |bytes| Exchange::inside(collective, ranks, bytes);
                requests.extend([2, 1000, 30_000].map(of));
            }
        }
        let mut profile = Profile {
            schema_version: 1,
            tool_version: String::new(),
            machine: machine(1),
            measured: Vec::new(),
        };
        let time = (Budget::new(Duration::ZERO), EFFORT);
        let left_out = with_fleet(
            machine(1),
            ranks,
            |_| Ok(open(false)),
            |fleet| {
                complete(fleet, &mut profile, &requests, time, |_, _| {
                    Ok::<(), ProfilerError>(())
                })
            },
        );
        assert_eq!(left_out, Ok(Vec::new()));
        assert_eq!(profile.machine, machine(ranks as u64));
        let mut wanted: Vec<_> = requests.iter().flat_map(Asked::kernels).collect();
        wanted.sort();
        let got = profile.measured.iter().map(|m| (&m.kernel, &m.sizes));
        assert!(got.eq(wanted.iter().map(|k| (&k.name, &k.sizes))));
        assert!(profile.measured.iter().all(|m| m.seconds > 0.0));
    }
}

#[test]
fn numbers_that_do_not_come_and_devices_that_are_not_there_end_it() {
    for &collective in COLLECTIVES {
        let exchange = Exchange::inside(collective, 3, 300);
        let answer = with_fleet(
            machine(1),
            3,
            |rank| Ok(open(rank == 1)),
            |fleet| fleet.measure(&exchange, EFFORT),
        );
        // Rank 1 reported it, or the first rank noticed it in what it received.
        let said = answer.expect_err("refused").to_string();
        assert!(said.contains("nccl"), "{collective:?}: {said}");
    }
    let missing = ProfilerError::Cuda(CudaError::NoDevice);
    let answer = with_fleet(
        machine(1),
        3,
        |rank| match rank {
            2 => Err(missing.clone()),
            _ => Ok(open(false)),
        },
        |fleet| {
            let exchange = Exchange::inside(Collective::AllReduce, 3, 8);
            fleet.measure(&exchange, EFFORT)
        },
    );
    let said = answer.expect_err("refused").to_string();
    assert!(said.contains(&missing.to_string()), "{said}");
}

/// Two hosts of two or three GPUs each: groups of one, two or all GPUs of each host; a third GPU
/// waits.
#[test]
fn exchanges_between_hosts_are_right_and_named() {
    for (per_host, groups) in [(2, &[[2, 1], [4, 2]][..]), (3, &[[2, 1], [4, 2], [6, 3]])] {
        let mut requests = Vec::new();
        for &collective in COLLECTIVES {
            requests.extend(groups.iter().map(|&[ranks, together]| Exchange {
                collective,
                ranks,
                together,
                bytes: 1000,
            }));
            requests.push(Exchange::inside(collective, 2, 1000));
        }
        let mut comms = local::world(2 * per_host, Duration::from_secs(60)).into_iter();
        let first = comms.next().expect("a rank");
        std::thread::scope(|scope| {
            for comm in comms {
                scope.spawn(move || follow(open(false), &comm, per_host).expect("follows"));
            }
            let mut fleet = Fleet::new(machine(1), open(false), &first, per_host);
            for request in &requests {
                let measured = fleet.measure(request, EFFORT).expect("measured");
                let [got] = measured.as_slice() else {
                    panic!("{measured:?}");
                };
                let name = Kernel::new(got.kernel.clone(), got.sizes.clone());
                assert_eq!(request.kernels(), [name]);
            }
            let gpu = fleet.machine().gpu.expect("a GPU");
            assert_eq!((gpu.count, gpu.hosts), (per_host as u64, Some(2)));
        });
    }
    let apart = Exchange {
        collective: Collective::AllReduce,
        ranks: 4,
        together: 2,
        bytes: 8,
    };
    let named = Kernel::new("nccl all-reduce over hosts", [4u64, 2, 8]);
    assert_eq!(apart.kernels(), [named]);
}
