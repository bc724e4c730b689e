//! What a transport does: it sends and receives messages, in order.

use std::sync::Arc;
use std::time::Duration;

/// Bytes under way; ranks that share a process share them.
pub type Message = Arc<Vec<u8>>;

/// Why communication stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A rank waited too long.
    #[error("rank {rank} waited {seconds} s for rank {peer} in {collective}", seconds = waited.as_secs_f64())]
    Timeout {
        /// Who waited.
        rank: usize,
        /// For whom.
        peer: usize,
        /// In what.
        collective: String,
        /// How long.
        waited: Duration,
    },
    /// Another rank stopped.
    #[error("rank {rank} stopped in {collective} because rank {failed} failed: {reason}")]
    PeerFailed {
        /// Who noticed.
        rank: usize,
        /// In what.
        collective: String,
        /// Who failed.
        failed: usize,
        /// With what.
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
        /// Who received.
        rank: usize,
        /// From whom.
        peer: usize,
        /// In what.
        collective: String,
        /// Bytes received.
        got: usize,
        /// Bytes expected.
        expected: usize,
    },
}

/// Point-to-point messages, in order per sender, receiver and channel.
pub trait Communicator: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;
    /// All ranks.
    fn world(&self) -> usize;
    /// Sends without waiting for the receiver.
    ///
    /// # Errors
    /// When the job has failed.
    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError>;
    /// Waits for the next message of a sender on a channel.
    ///
    /// # Errors
    /// When it does not come in time, or the job has failed.
    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError>;
    /// Whether the job still runs, for who waits elsewhere than in [`Communicator::receive`].
    ///
    /// # Errors
    /// When the job has failed.
    fn check(&self, what: &str) -> Result<(), CommError>;
    /// Tells every rank that this one cannot go on.
    fn fail(&self, reason: &str);
}
