//! A single rank without its peers: a message from a peer is what was sent to that peer.
//!
//! For measuring one rank's computation: its peers would send messages of the same sizes.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use super::communicator::{CommError, Communicator, Message};

/// A rank whose peers echo its messages.
#[derive(Debug)]
pub struct Loopback {
    rank: usize,
    world: usize,
    sent: Mutex<HashMap<(usize, u64), VecDeque<Message>>>,
}

impl Loopback {
    /// Rank `rank` of `world`.
    #[must_use]
    pub fn new(rank: usize, world: usize) -> Self {
        Self {
            rank,
            world,
            sent: Mutex::default(),
        }
    }

    fn queues(&self) -> std::sync::MutexGuard<'_, HashMap<(usize, u64), VecDeque<Message>>> {
        self.sent
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Communicator for Loopback {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn send(&self, to: usize, channel: u64, _what: &str, data: Message) -> Result<(), CommError> {
        self.queues()
            .entry((to, channel))
            .or_default()
            .push_back(data);
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        let echo = self
            .queues()
            .get_mut(&(from, channel))
            .and_then(VecDeque::pop_front);
        echo.ok_or_else(|| CommError::PeerFailed {
            rank: self.rank,
            collective: what.to_owned(),
            failed: from,
            reason: "it has no message to echo".to_owned(),
        })
    }

    fn check(&self, _what: &str) -> Result<(), CommError> {
        Ok(())
    }

    fn fail(&self, _reason: &str) {}
}
