//! The interface for exchanges between devices, and handles of exchanges under way.

use crate::error::CudaError;
use crate::gpu::Event;
use crate::tensor::Tensor;
use comm::{Group, Pending};

/// A rank's links to the devices of other ranks. Operands are contiguous; `what` names the exchange in errors.
pub trait Links {
    /// All-reduce: `to` becomes the sum of all ranks' `from`.
    ///
    /// # Errors
    /// When the device or a peer failed; the same holds for the functions below.
    fn all_reduce(
        &self,
        group: &Group,
        what: &str,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<Ticket, CudaError>;
    /// Reduce-scatter: `own` becomes the sum of all ranks' parts for this rank; part `i` is for rank `i` of the group.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn reduce_scatter(
        &self,
        group: &Group,
        what: &str,
        parts: &[Tensor],
        own: &Tensor,
    ) -> Result<Ticket, CudaError>;
    /// All-gather: part `i` becomes `own` of rank `i` of the group.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn all_gather(
        &self,
        group: &Group,
        what: &str,
        own: &Tensor,
        parts: &[Tensor],
    ) -> Result<Ticket, CudaError>;
    /// All-to-all: sends tensor `i` to rank `i` of the group, and receives the tensor that it has for this rank.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn all_to_all(
        &self,
        group: &Group,
        what: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<Ticket, CudaError>;
    /// Makes work queued from now on wait for a collective or a message begun here.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn wait(&self, ticket: Ticket) -> Result<(), CudaError>;
    /// Connects this rank with peers before the first message to them; every rank passes its `(peer, channel)` pairs.
    /// Without it, ranks that send to each other before they receive could deadlock.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), CudaError>;
    /// Sends a tensor; the messages of a channel arrive in order. The tensor must not be written until its ticket was
    /// waited for, and that wait blocks until the peer receives it.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn send(&self, to: usize, channel: u64, what: &str, x: &Tensor) -> Result<Ticket, CudaError>;
    /// Receives a tensor that a peer sent, of the same shape and type.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn receive(&self, from: usize, channel: u64, what: &str, x: &Tensor) -> Result<(), CudaError>;
    /// Blocks the host until every exchange begun so far is done, at most for the timeout.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn settle(&self, what: &str) -> Result<(), CudaError>;
    /// Whether exchanges can be captured into a graph.
    ///
    /// # Errors
    /// The reason why they cannot.
    fn captures(&self) -> Result<(), &'static str>;
}

/// A collective or a message under way, to be waited for by whoever began it. It keeps its tensors alive.
#[must_use = "nothing may touch what it is of before it was waited for"]
#[derive(Debug)]
pub struct Ticket {
    pub(super) tensors: Vec<Tensor>,
    pub(super) way: Way,
}

/// How an exchange ends.
#[derive(Debug)]
pub(super) enum Way {
    /// When messages arrive through the host, one for every tensor.
    Arriving(Pending),
    /// When messages arrive through the host, to be summed into the one tensor.
    Summing(Pending),
    /// When an event of another stream is reached.
    Event(Event),
    /// It has already ended.
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
