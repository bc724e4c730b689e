//! A communicator for ranks that are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use super::communicator::{CommError, Communicator, Message};
use super::inbox::{Failure, Inbox, Waiter};

struct Shared {
    boxes: Vec<Inbox>,
    failed: Failure,
    timeout: Duration,
}

/// One rank of a job whose ranks are threads.
#[derive(Clone)]
pub struct LocalCommunicator {
    rank: usize,
    shared: Arc<Shared>,
}

/// Communicators of `world` ranks that wait at most `timeout` for each other.
#[must_use]
pub fn world(world: usize, timeout: Duration) -> Vec<LocalCommunicator> {
    let shared = Arc::new(Shared {
        boxes: (0..world).map(|_| Inbox::default()).collect(),
        failed: Failure::new(),
        timeout,
    });
    (0..world)
        .map(|rank| LocalCommunicator {
            rank,
            shared: Arc::clone(&shared),
        })
        .collect()
}

impl LocalCommunicator {
    fn waiter(&self) -> Waiter<'_> {
        Waiter {
            rank: self.rank,
            failed: &self.shared.failed,
            timeout: self.shared.timeout,
        }
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.boxes.len()
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.waiter().check(what)?;
        self.shared.boxes[to].put(self.rank, channel, data);
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        self.shared.boxes[self.rank].take(&self.waiter(), (from, channel), what)
    }

    fn check(&self, what: &str) -> Result<(), CommError> {
        self.waiter().check(what)
    }

    fn fail(&self, reason: &str) {
        let _ = self.shared.failed.set((self.rank, reason.to_owned()));
        self.shared.boxes.iter().for_each(Inbox::wake);
    }
}
