//! A communicator for ranks that are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use super::communicator::{CommError, Communicator, Message};
use super::inbox::{Failure, Inbox};

/// One rank of a job whose ranks are threads.
#[derive(Clone)]
pub struct LocalCommunicator {
    rank: usize,
    boxes: Arc<Vec<Inbox>>,
}

/// Communicators of `world` ranks that wait at most `timeout` for each other.
#[must_use]
pub fn world(world: usize, timeout: Duration) -> Vec<LocalCommunicator> {
    let failed = Arc::<Failure>::default();
    let boxes = (0..world).map(|rank| Inbox::new(rank, timeout, Arc::clone(&failed)));
    let boxes: Arc<Vec<Inbox>> = Arc::new(boxes.collect());
    (0..world)
        .map(|rank| LocalCommunicator {
            rank,
            boxes: Arc::clone(&boxes),
        })
        .collect()
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.boxes.len()
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.check(what)?;
        self.boxes[to].put(self.rank, channel, data);
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        self.boxes[self.rank].take(from, channel, what)
    }

    fn check(&self, what: &str) -> Result<(), CommError> {
        self.boxes[self.rank].check(what)
    }

    fn fail(&self, reason: &str) {
        for inbox in self.boxes.iter() {
            inbox.fail(self.rank, reason.to_owned());
        }
    }
}
