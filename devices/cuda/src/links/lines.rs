//! A rank's lines to the devices of other ranks, and what is under way on them.

use crate::error::CudaError;
use crate::gpu::Event;
use crate::tensor::Tensor;
use comm::{Group, Pending};

/// A rank's lines to the devices of other ranks. Operands lie without gaps; `what` is for errors.
pub trait Links {
    /// `to` becomes the sum of all members' `from`.
    ///
    /// # Errors
    /// When the device or a peer failed; so of all below.
    fn all_reduce(
        &self,
        group: &Group,
        what: &str,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<Ticket, CudaError>;
    /// `own` becomes the sum of all members' parts for this rank; the `i`-th part is for the `i`-th member.
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
    /// The `i`-th part becomes the `i`-th member's `own`.
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
    /// Sends the `i`-th tensor to the `i`-th member, and receives its for this rank.
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
    /// Has all work queued from now on come after a collective that was begun here, or a message.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn wait(&self, ticket: Ticket) -> Result<(), CudaError>;
    /// Meets ranks before the first message to them: every rank gives its `(peer, channel)`s. Without, ranks that
    /// send to each other before they receive could wait for each other.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), CudaError>;
    /// Sends a tensor; messages of a channel arrive in order. Until it was waited for nothing may write to it, and who
    /// waits before the peer takes it waits for the peer.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn send(&self, to: usize, channel: u64, what: &str, x: &Tensor) -> Result<Ticket, CudaError>;
    /// Receives what [`Links::send`] sent, of the same shape and type.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn receive(&self, from: usize, channel: u64, what: &str, x: &Tensor) -> Result<(), CudaError>;
    /// Waits on the host until all that was begun is done, and no longer than ranks wait for each other.
    ///
    /// # Errors
    /// See [`Links::all_reduce`].
    fn settle(&self, what: &str) -> Result<(), CudaError>;
    /// Whether messages can be part of captured work.
    ///
    /// # Errors
    /// Why they cannot.
    fn captures(&self) -> Result<(), &'static str>;
}

/// A collective or a message under way, to be waited for by who began it. It holds what it reads and writes.
#[must_use = "nothing may touch what it is of before it was waited for"]
#[derive(Debug)]
pub struct Ticket {
    pub(super) tensors: Vec<Tensor>,
    pub(super) way: Way,
}

/// How a collective ends.
#[derive(Debug)]
pub(super) enum Way {
    /// With messages, one for every tensor.
    Arriving(Pending),
    /// With messages whose sum is the one tensor.
    Summing(Pending),
    /// With an event of another queue.
    Event(Event),
    /// It has ended.
    Done,
}

impl Ticket {
    /// Of what ended when it was asked for.
    pub(super) fn done() -> Self {
        Self {
            tensors: Vec::new(),
            way: Way::Done,
        }
    }
}
