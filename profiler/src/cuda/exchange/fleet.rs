//! A thread per rank, each with its device; requests go to all of them.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use dtensor::comm::local::{self, LocalCommunicator};
use dtensor::comm::{CommError, Communicator, Group};
use spec::profile::{Gpu, Machine, Measured};

use super::rank::Member;
use super::{Exchange, Peers, Rank};
use crate::ProfilerError;
use crate::cuda::Meter;
use crate::lanes::Effort;

/// How long ranks wait for each other.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// Channel on which the ranks of a group meet, beside the number of them.
const MEETING: u64 = 1 << 16;

type Answer = Result<Vec<Measured>, ProfilerError>;

/// Ranks that wait for requests.
pub struct Fleet {
    machine: Machine,
    ranks: Vec<Sender<(Exchange, Effort)>>,
    answers: Receiver<Answer>,
}

/// Opens `count` devices of one machine, each in a thread of its own, and lets `work` measure between them.
pub fn with_fleet<R: Rank, T>(
    machine: Machine,
    count: usize,
    open: impl Fn(usize) -> Result<R, ProfilerError> + Sync,
    work: impl FnOnce(&mut Fleet) -> T,
) -> T {
    let gpu = machine.gpu.unwrap_or_default();
    let machine = Machine {
        gpu: Some(Gpu {
            count: count as u64,
            ..gpu
        }),
        ..machine
    };
    let (answer, answers) = channel();
    std::thread::scope(|scope| {
        let mut ranks = Vec::with_capacity(count);
        for comm in local::world(count, TIMEOUT) {
            let (request, requests) = channel();
            ranks.push(request);
            let (open, answer) = (&open, answer.clone());
            scope.spawn(move || serve(open, &comm, &requests, &answer));
        }
        // Dropped with the fleet, requests end, and with them the ranks.
        work(&mut Fleet {
            machine,
            ranks,
            answers,
        })
    })
}

impl Meter for Fleet {
    type Asked = Exchange;

    fn measure(
        &mut self,
        exchange: &Exchange,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError> {
        for rank in &self.ranks {
            // A rank that has ended has said why.
            let _ = rank.send((*exchange, effort));
        }
        let mut measured = Vec::new();
        let mut failed: Option<ProfilerError> = None;
        for answer in self.answers.iter().take(self.ranks.len()) {
            match answer {
                Ok(own) => measured.extend(own),
                // Who stopped because another failed is not the one to hear about.
                Err(error) if failed.as_ref().is_none_or(is_of_a_peer) => failed = Some(error),
                Err(_) => {}
            }
        }
        failed.map_or(Ok(measured), Err)
    }

    fn machine(&self) -> Machine {
        self.machine.clone()
    }
}

fn is_of_a_peer(error: &ProfilerError) -> bool {
    matches!(
        error,
        ProfilerError::Comm(CommError::PeerFailed { .. } | CommError::Timeout { .. })
    )
}

/// One rank: opens its device, then does what is asked until nothing more is, or something fails.
fn serve<R: Rank>(
    open: &impl Fn(usize) -> Result<R, ProfilerError>,
    comm: &LocalCommunicator,
    requests: &Receiver<(Exchange, Effort)>,
    answers: &Sender<Answer>,
) {
    let answer = |answer: Answer| {
        if let Err(error) = &answer {
            comm.fail(&error.to_string());
        }
        let going_on = answer.is_ok();
        answers.send(answer).is_ok() && going_on
    };
    let rank = match open(comm.rank()) {
        Ok(rank) => rank,
        Err(error) => {
            answer(Err(error));
            return;
        }
    };
    let mut met: BTreeMap<u64, Option<Box<dyn Peers>>> = BTreeMap::new();
    for (exchange, effort) in requests {
        if !answer(measure(&rank, comm, &mut met, &exchange, effort)) {
            break;
        }
    }
}

/// Measures as this rank, which meets the others of its group when they first have something to say.
fn measure(
    rank: &dyn Rank,
    comm: &dyn Communicator,
    met: &mut BTreeMap<u64, Option<Box<dyn Peers>>>,
    exchange: &Exchange,
    effort: Effort,
) -> Answer {
    let size = exchange.ranks as usize;
    let group = group(comm, size);
    let first = !met.contains_key(&exchange.ranks);
    if first {
        let peers = match &group {
            Some(group) => Some(rank.join(comm, group)?),
            None => None,
        };
        met.insert(exchange.ranks, peers);
    }
    let peers = met.get(&exchange.ranks).and_then(Option::as_deref);
    let member = Member {
        rank,
        comm,
        peers,
        index: comm.rank() % size,
    };
    member.measure(exchange, effort)
}

/// The group of so many ranks that this one is in, if there are enough of them.
fn group(comm: &dyn Communicator, size: usize) -> Option<Group> {
    let first = comm.rank() / size * size;
    (first + size <= comm.world()).then(|| Group {
        ranks: (first..first + size).collect(),
        index: comm.rank() - first,
        channel: MEETING + size as u64,
    })
}
