//! Exchanges between GPUs by NCCL, with a communicator and a stream of its own for every group and channel, so that an
//! exchange that waits for a peer never delays another.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use super::lines::{Collective, Links, Ticket, Way, copied};
use crate::error::CudaError;
use crate::gpu::{Event, Gpu};
use crate::launcher::Launcher;
use crate::nccl::{self, NcclGroup, give_up, is_soon, settle};
use crate::tensor::Tensor;
use comm::{Communicator, Group};

/// Bytes of a greeting's buffer: one to send, one to receive.
const WORDS: u64 = 2;

/// NCCL groups created so far, by channel and ranks.
type Met = BTreeMap<(u64, Vec<usize>), Rc<NcclGroup>>;

/// Links through NCCL.
pub struct NcclLinks<'c> {
    gpu: Rc<Gpu>,
    comm: &'c dyn Communicator,
    timeout: Duration,
    groups: RefCell<Met>,
    /// Messages from this rank to itself, by channel.
    own: RefCell<HashMap<u64, VecDeque<Tensor>>>,
}

impl<'c> NcclLinks<'c> {
    /// Links of a GPU. Groups are created at their first exchange; ranks wait for each other at most `timeout`.
    ///
    /// # Errors
    /// When NCCL is missing.
    pub fn new(
        gpu: Rc<Gpu>,
        comm: &'c dyn Communicator,
        timeout: Duration,
    ) -> Result<Self, CudaError> {
        nccl::load()?;
        Ok(Self {
            gpu,
            comm,
            timeout,
            groups: RefCell::default(),
            own: RefCell::default(),
        })
    }

    fn group(&self, group: &Group) -> Result<Rc<NcclGroup>, CudaError> {
        let key = (group.channel, group.ranks.clone());
        if let Some(met) = self.groups.borrow().get(&key) {
            return Ok(Rc::clone(met));
        }
        let met = NcclGroup::beside(Rc::clone(&self.gpu), self.comm, group)?;
        let met = Rc::new(met);
        self.groups.borrow_mut().insert(key, Rc::clone(&met));
        Ok(met)
    }

    /// Queues a group's collective after all work queued on the GPU so far; returns the event of its end.
    fn queue(
        &self,
        group: &NcclGroup,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Event, CudaError> {
        match group.side() {
            Some(side) => {
                self.gpu.fork(side)?;
                work()?;
                self.gpu.end_of(side)
            }
            None => {
                work()?;
                self.gpu.event()
            }
        }
    }

    /// Queues an exchange of a group that reads and writes these tensors.
    fn ticket(
        &self,
        group: &Group,
        tensors: Vec<Tensor>,
        work: impl FnOnce(&NcclGroup) -> Result<(), CudaError>,
    ) -> Result<Ticket, CudaError> {
        let met = self.group(group)?;
        let end = self.queue(&met, || work(&met))?;
        let way = Way::Event(end);
        Ok(Ticket { tensors, way })
    }

    /// The group of this rank and a peer for one channel.
    fn pair(&self, peer: usize, channel: u64) -> Group {
        let rank = self.comm.rank();
        Group {
            ranks: vec![rank.min(peer), rank.max(peer)],
            index: usize::from(rank > peer),
            channel,
        }
    }
}

/// All parts as one tensor, if they are contiguous in memory and of equal length.
fn in_line(parts: &[Tensor]) -> Option<Tensor> {
    let first = parts.first()?;
    let bytes = first.bytes();
    let mut at = first.address();
    for part in parts {
        if part.address() != at || part.bytes() != bytes {
            return None;
        }
        at += bytes;
    }
    first.extended(parts.len())
}

impl Links for NcclLinks<'_> {
    fn collective(
        &self,
        kind: Collective,
        group: &Group,
        _: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<Ticket, CudaError> {
        if group.size() == 1 {
            return copied(&*self.gpu, &from[0], &to[0]);
        }
        self.ticket(group, [from, to].concat(), |met| match kind {
            Collective::AllReduce => met.all_reduce(&from[0], &to[0]),
            Collective::ReduceScatter => match in_line(from) {
                Some(whole) => met.reduce_scatter(&whole, &to[0]),
                None => met.by_rank(from, |part, root| met.reduce(part, &to[0], root)),
            },
            Collective::AllGather => match in_line(to) {
                Some(whole) => met.all_gather(&from[0], &whole),
                None => met.by_rank(to, |part, root| met.broadcast(&from[0], part, root)),
            },
            Collective::AllToAll => met.all_to_all(from, to),
        })
    }

    fn wait(&self, ticket: Ticket) -> Result<(), CudaError> {
        match &ticket.way {
            Way::Event(end) => self.gpu.join(end),
            _ => Ok(()),
        }
    }

    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), CudaError> {
        let rank = self.comm.rank();
        let others = peers.iter().filter(|&&(peer, _)| peer != rank);
        let pairs = others.map(|&(peer, channel)| self.pair(peer, channel));
        // All ranks connect in the same order, so that no two wait for each other.
        let sorted: BTreeMap<_, _> = pairs
            .map(|pair| ((pair.channel, pair.ranks.clone()), pair))
            .collect();
        let word = self.gpu.allocate(WORDS)?;
        for pair in sorted.values() {
            let met = self.group(pair)?;
            // NCCL connects two ranks at their first message, and blocks each until the other takes part.
            let end = self.queue(&met, || met.greet(word, 1 - pair.index))?;
            self.gpu.join(&end)?;
        }
        self.settle("meeting")?;
        self.gpu.free(word)
    }

    fn send(&self, to: usize, channel: u64, _: &str, x: &Tensor) -> Result<Ticket, CudaError> {
        if to == self.comm.rank() {
            let mut own = self.own.borrow_mut();
            own.entry(channel).or_default().push_back(x.clone());
            return Ok(Ticket::done());
        }
        let pair = self.pair(to, channel);
        self.ticket(&pair, vec![x.clone()], |met| met.send(x, 1 - pair.index))
    }

    fn receive(&self, from: usize, channel: u64, what: &str, x: &Tensor) -> Result<(), CudaError> {
        if from == self.comm.rank() {
            let mut own = self.own.borrow_mut();
            let sent = own.get_mut(&channel).and_then(VecDeque::pop_front);
            let Some(sent) = sent else {
                let reason = "a message to itself that it has not sent";
                return Err(CudaError::unsupported("receiving", what, reason));
            };
            return copied(&*self.gpu, &sent, x).map(|_| ());
        }
        let pair = self.pair(from, channel);
        let ticket = self.ticket(&pair, vec![x.clone()], |met| met.receive(x, 1 - pair.index));
        self.wait(ticket?)
    }

    fn settle(&self, what: &str) -> Result<(), CudaError> {
        let groups = self.groups.borrow();
        let groups: Vec<&NcclGroup> = groups.values().map(|group| &**group).collect();
        settle(&groups, &self.gpu.event()?, self.comm, (what, self.timeout))
    }

    fn captures(&self) -> Result<(), &'static str> {
        Ok(())
    }
}

impl Drop for NcclLinks<'_> {
    fn drop(&mut self) {
        // Captured graphs keep NCCL groups alive, so the graphs are destroyed first.
        self.gpu.forget_captured();
        let groups = self.groups.borrow();
        let groups: Vec<&NcclGroup> = groups.values().map(|group| &**group).collect();
        let is_idle = self.gpu.event().and_then(|end| is_soon(&end)) == Ok(true);
        if !is_idle || groups.iter().any(|group| group.is_open()) {
            // A failure here cannot be handled.
            let _ = give_up(&groups);
        }
    }
}
