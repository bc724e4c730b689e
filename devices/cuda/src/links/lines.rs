//! The interface for exchanges between devices, and handles of exchanges under way.

use crate::error::CudaError;
use crate::gpu::Event;
use crate::launcher::Launcher;
use crate::tensor::Tensor;
use comm::{Group, Pending};

/// What a collective makes of the tensors `from` that it reads and `to` that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// The one tensor written becomes the sum of all ranks' one tensor.
    AllReduce,
    /// The one tensor written becomes the sum of all ranks' parts for this rank; part `i` is for rank `i` of the group.
    ReduceScatter,
    /// Part `i` becomes the one tensor of rank `i` of the group.
    AllGather,
    /// Sends tensor `i` to rank `i` of the group, and receives the tensor that it has for this rank.
    AllToAll,
}

/// A rank's links to the devices of other ranks. Operands are contiguous; `what` names the exchange in errors.
pub trait Links {
    /// Begins a collective of a group.
    ///
    /// # Errors
    /// When the device or a peer failed; the same holds for the functions below.
    fn collective(
        &self,
        kind: Collective,
        group: &Group,
        what: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<Ticket, CudaError>;
    /// A collective of a group, for which work queued from now on waits.
    fn exchange(
        &self,
        kind: Collective,
        group: &Group,
        what: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<(), CudaError> {
        self.wait(self.collective(kind, group, what, from, to)?)
    }
    /// Makes work queued from now on wait for a collective or a message begun here.
    fn wait(&self, ticket: Ticket) -> Result<(), CudaError>;
    /// Connects this rank with peers before the first message to them; every rank passes its `(peer, channel)` pairs.
    /// Without it, ranks that send to each other before they receive could deadlock.
    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), CudaError>;
    /// Sends a tensor; messages of a channel arrive in order. Do not write it before waiting for
    /// its ticket. Over NCCL, work queued after that wait starts only when the peer has received.
    fn send(&self, to: usize, channel: u64, what: &str, x: &Tensor) -> Result<Ticket, CudaError>;
    /// Receives a tensor that a peer sent, of the same shape and type.
    fn receive(&self, from: usize, channel: u64, what: &str, x: &Tensor) -> Result<(), CudaError>;
    /// Blocks the host, at most for the timeout, until queued work and exchanges it waits for end.
    fn settle(&self, what: &str) -> Result<(), CudaError>;
    /// Whether exchanges can be captured into a graph.
    ///
    /// # Errors
    /// The reason why they cannot.
    fn captures(&self) -> Result<(), &'static str>;
}

/// A collective or a message under way, to be waited for by whoever began it. It keeps its tensors alive.
#[must_use = "its tensors must not be touched before it was waited for"]
#[derive(Debug)]
pub struct Ticket {
    pub(super) tensors: Vec<Tensor>,
    pub(super) way: Way,
}

/// What ends an exchange.
#[derive(Debug)]
pub(super) enum Way {
    /// Messages that arrive through the host, one for every tensor.
    Arriving(Pending),
    /// Messages that arrive through the host, to be summed into the one tensor.
    Summing(Pending),
    /// An event of another stream.
    Event(Event),
    /// Nothing: it has already ended.
    Done,
}

impl Ticket {
    /// The ticket of an exchange that was complete when the call returned.
    pub(super) fn done() -> Self {
        Self {
            tensors: Vec::new(),
            way: Way::Done,
        }
    }
}

/// The collective of a group of one: a copy.
pub(super) fn copied(
    launcher: &dyn Launcher,
    from: &Tensor,
    to: &Tensor,
) -> Result<Ticket, CudaError> {
    if from.address() != to.address() {
        launcher.copy(to.address(), from.address(), from.bytes())?;
    }
    Ok(Ticket::done())
}
