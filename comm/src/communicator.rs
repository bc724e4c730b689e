//! The interface of a transport between ranks: it sends messages and receives them in the order sent.

use std::sync::Arc;
use std::time::Duration;

/// The bytes of a message, shared instead of copied between ranks of one process.
pub type Message = Arc<Vec<u8>>;

/// Why communication stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// No message came within the time that a rank waits.
    #[error("rank {rank} waited {seconds} s for rank {peer} in {collective}", seconds = waited.as_secs_f64())]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The rank whose message did not come.
        peer: usize,
        /// The operation that it was part of.
        collective: String,
        /// How long it waited.
        waited: Duration,
    },
    /// Another rank failed, so this one stops too.
    #[error("rank {rank} stopped in {collective} because rank {failed} failed: {reason}")]
    PeerFailed {
        /// The rank that stops.
        rank: usize,
        /// The operation that it was part of.
        collective: String,
        /// The rank that failed first.
        failed: usize,
        /// What that rank said of its failure.
        reason: String,
    },
    /// The transport cannot start.
    #[error("ranks cannot communicate: {reason}")]
    Start {
        /// Why.
        reason: String,
    },
    /// A message has the wrong size: ranks do not run the same program.
    #[error("rank {rank} got {got} bytes from rank {peer} in {collective}, expected {expected}")]
    Size {
        /// The rank that received it.
        rank: usize,
        /// The rank that sent it.
        peer: usize,
        /// The operation that it was part of.
        collective: String,
        /// Bytes received.
        got: usize,
        /// Bytes expected.
        expected: usize,
    },
}

impl CommError {
    /// Checks that a message which `rank` got from `peer` has the expected size in bytes.
    ///
    /// # Errors
    /// When it has another: the ranks run different programs.
    pub fn check_size(
        [rank, peer]: [usize; 2],
        collective: &str,
        got: usize,
        expected: usize,
    ) -> Result<(), Self> {
        if got == expected {
            return Ok(());
        }
        Err(Self::Size {
            rank,
            peer,
            collective: collective.to_owned(),
            got,
            expected,
        })
    }
}

/// Point-to-point messages. Those with the same sender, receiver and channel arrive in the order sent.
pub trait Communicator: Send + Sync {
    /// Number of this rank.
    fn rank(&self) -> usize;
    /// Number of ranks in the job.
    fn world(&self) -> usize;
    /// Sends `data` to rank `to`, and returns before it is received. `what` names the operation in errors.
    ///
    /// # Errors
    /// When the job has failed.
    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError>;
    /// Waits for the next message that rank `from` sent on a channel. `what` names the operation in errors.
    ///
    /// # Errors
    /// When no message comes within the job's timeout, or another rank has failed.
    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError>;
    /// Asks whether another rank has failed. For code that waits on something else, such as a GPU.
    ///
    /// # Errors
    /// When one has.
    fn check(&self, what: &str) -> Result<(), CommError>;
    /// Tells every other rank that this one has failed, and why.
    fn fail(&self, reason: &str);
}
