//! Ranks that measure exchanges together: rank 0 requests measurements, the others follow.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use catalog::profile::{Gpu, Machine, Measured};
use comm::local;
use comm::{Communicator, Group};

use super::collective::{COLLECTIVES, Exchange};
use super::peers::{Peers, Rank};
use super::rank::Member;
use crate::ProfilerError;
use crate::cuda::Meter;
use crate::lanes::Effort;

/// How long ranks wait for each other.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// Channel on which the ranks of a group meet, combined with the group's size and its ranks per host.
const MEETING: u64 = 1 << 48;
/// Channel on which rank 0 announces requests.
const REQUESTS: u64 = 62;

/// All ranks with their GPUs, as rank 0 sees them.
pub struct Fleet<'c> {
    machine: Machine,
    own: Own<'c>,
}

/// One rank, and the groups that it has joined so far.
struct Own<'c> {
    rank: Box<dyn Rank>,
    comm: &'c dyn Communicator,
    /// Number of GPUs per host; the ranks of a host are consecutive.
    per_host: usize,
    met: BTreeMap<u64, Option<Met>>,
}

/// A group that this rank has joined.
struct Met {
    peers: Box<dyn Peers>,
    index: usize,
}

/// Opens `count` devices of one host, the first in this thread and each other in its own, and runs `work` on the fleet.
///
/// # Errors
/// When `work` fails, or the first device cannot be opened.
pub fn with_fleet<R: Rank + 'static, T, E: From<ProfilerError>>(
    machine: Machine,
    count: usize,
    open: impl Fn(usize) -> Result<R, ProfilerError> + Sync,
    work: impl FnOnce(&mut Fleet<'_>) -> Result<T, E>,
) -> Result<T, E> {
    let mut comms = local::world(count, TIMEOUT).into_iter();
    let Some(first) = comms.next() else {
        return Err(ProfilerError::Cuda(cuda_device::CudaError::NoDevice).into());
    };
    std::thread::scope(|scope| {
        for comm in comms {
            let open = &open;
            scope.spawn(move || {
                let followed = open(comm.rank()).and_then(|rank| follow(rank, &comm, count));
                if let Err(error) = followed {
                    comm.fail(&error.to_string());
                }
            });
        }
        let opened = open(0).inspect_err(|error| first.fail(&error.to_string()));
        work(&mut Fleet::new(machine, opened?, &first, count))
    })
}

impl<'c> Fleet<'c> {
    /// Makes rank 0 of a fleet with `per_host` ranks on every host. The other ranks must call [`follow`], which
    /// does as rank 0 says until this value is dropped.
    pub fn new(
        machine: Machine,
        rank: impl Rank + 'static,
        comm: &'c dyn Communicator,
        per_host: usize,
    ) -> Self {
        let gpu = machine.gpu.unwrap_or_default();
        let machine = Machine {
            gpu: Some(Gpu {
                count: per_host as u64,
                hosts: Some((comm.world() / per_host) as u64).filter(|&hosts| hosts > 1),
                ..gpu
            }),
            ..machine
        };
        let own = Own::new(rank, comm, per_host);
        Self { machine, own }
    }
}

/// Takes part in the measurements that rank 0 requests, until it is done.
///
/// # Errors
/// When the device or another rank fails, or wrong numbers arrive.
pub fn follow(
    rank: impl Rank + 'static,
    comm: &dyn Communicator,
    per_host: usize,
) -> Result<(), ProfilerError> {
    let mut own = Own::new(rank, comm, per_host);
    while let Some((exchange, effort)) = asked(comm, None)? {
        own.measure(&exchange, effort)?;
    }
    Ok(())
}

impl Meter for Fleet<'_> {
    type Asked = Exchange;

    fn measure(
        &mut self,
        exchange: &Exchange,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError> {
        let comm = self.own.comm;
        let measured = asked(comm, Some(words(exchange, effort)))
            .and_then(|_| self.own.measure(exchange, effort));
        measured.inspect_err(|error| comm.fail(&error.to_string()))
    }

    fn machine(&self) -> Machine {
        self.machine.clone()
    }
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        // If a rank has failed, all ranks know already.
        let _ = asked(self.own.comm, Some(Vec::new()));
    }
}

/// Rank 0's next request, broadcast as `words`; `None` at the end.
fn asked(
    comm: &dyn Communicator,
    words: Option<Vec<u64>>,
) -> Result<Option<(Exchange, Effort)>, ProfilerError> {
    let everyone = Group {
        ranks: (0..comm.world()).collect(),
        index: comm.rank(),
        channel: REQUESTS,
    };
    let own = words.map(|words| Arc::new(words.into_iter().flat_map(u64::to_le_bytes).collect()));
    let told = everyone.broadcast(comm, "measuring", 0, own)?;
    let words: Vec<u64> = told
        .as_chunks::<8>()
        .0
        .iter()
        .map(|&bytes| u64::from_le_bytes(bytes))
        .collect();
    let &[collective, ranks, together, bytes, nanoseconds, least, most] = words.as_slice() else {
        return Ok(None);
    };
    let collective = COLLECTIVES.get(collective as usize);
    Ok(collective.map(|&collective| {
        let exchange = Exchange {
            collective,
            ranks,
            together,
            bytes,
        };
        let effort = Effort {
            time: Duration::from_nanos(nanoseconds),
            least: least as usize,
            most: most as usize,
        };
        (exchange, effort)
    }))
}

fn words(exchange: &Exchange, effort: Effort) -> Vec<u64> {
    let number = COLLECTIVES.iter().position(|&c| c == exchange.collective);
    vec![
        number.map_or(u64::MAX, |number| number as u64),
        exchange.ranks,
        exchange.together,
        exchange.bytes,
        effort.time.as_nanos() as u64,
        effort.least as u64,
        effort.most as u64,
    ]
}

impl<'c> Own<'c> {
    fn new(rank: impl Rank + 'static, comm: &'c dyn Communicator, per_host: usize) -> Self {
        Self {
            rank: Box::new(rank),
            comm,
            per_host,
            met: BTreeMap::new(),
        }
    }

    /// Measures an exchange as this rank, which joins its group first if it has not yet.
    fn measure(
        &mut self,
        exchange: &Exchange,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError> {
        let (rank, comm) = (&*self.rank, self.comm);
        let channel = MEETING | exchange.ranks << 16 | exchange.together;
        if !self.met.contains_key(&channel) {
            let group = group(comm, exchange, self.per_host, channel);
            let meet = |group: Group| -> Result<Met, ProfilerError> {
                Ok(Met {
                    peers: rank.join(comm, &group)?,
                    index: group.index,
                })
            };
            let met = group.map(meet).transpose()?;
            self.met.insert(channel, met);
        }
        let met = self.met.get(&channel).and_then(Option::as_ref);
        let member = Member {
            rank,
            comm,
            peers: met.map(|met| &*met.peers),
            index: met.map_or(0, |met| met.index),
        };
        member.measure(exchange, effort)
    }
}

/// This rank's group for an exchange, if there are enough ranks to fill it.
fn group(
    comm: &dyn Communicator,
    exchange: &Exchange,
    per_host: usize,
    channel: u64,
) -> Option<Group> {
    let together = exchange.together as usize;
    let hosts = exchange.ranks as usize / together;
    let (host, local) = (comm.rank() / per_host, comm.rank() % per_host);
    let (first_host, first_local) = (host / hosts * hosts, local / together * together);
    let there =
        first_local + together <= per_host && (first_host + hosts) * per_host <= comm.world();
    let ranks = || {
        let hosts = first_host..first_host + hosts;
        let of = |host: usize| (0..together).map(move |i| host * per_host + first_local + i);
        hosts.flat_map(of).collect()
    };
    there.then(|| Group {
        ranks: ranks(),
        index: (host - first_host) * together + local - first_local,
        channel,
    })
}
