//! The messages that have arrived at a rank, and waiting for them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::communicator::{CommError, Message};

type Queues = HashMap<(usize, u64), VecDeque<Message>>;

/// The first failure of a job: rank and reason. Later failures follow from it.
pub(super) type Failure = OnceLock<(usize, String)>;

/// One rank's received messages, queued in order per sender and channel.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) rank: usize,
    /// How long the rank waits for a message.
    pub(super) timeout: Duration,
    /// The job's failure, which ranks of one process share.
    pub(super) failed: Arc<Failure>,
    queues: Mutex<Queues>,
    arrived: Condvar,
}

impl Inbox {
    pub(super) fn new(rank: usize, timeout: Duration, failed: Arc<Failure>) -> Self {
        Self {
            rank,
            timeout,
            failed,
            queues: Mutex::default(),
            arrived: Condvar::new(),
        }
    }

    /// Fails if the job has failed.
    pub(super) fn check(&self, what: &str) -> Result<(), CommError> {
        match self.failed.get() {
            Some((failed, reason)) => Err(CommError::PeerFailed {
                rank: self.rank,
                collective: what.to_owned(),
                failed: *failed,
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Records the failure of a rank and wakes all waiting threads so that they notice. Returns whether it is the first.
    pub(super) fn fail(&self, failed: usize, reason: String) -> bool {
        let is_first = self.failed.set((failed, reason)).is_ok();
        let _queues = self.lock();
        self.arrived.notify_all();
        is_first
    }

    pub(super) fn put(&self, from: usize, channel: u64, data: Message) {
        self.lock()
            .entry((from, channel))
            .or_default()
            .push_back(data);
        self.arrived.notify_all();
    }

    /// Waits for the next message from a sender on a channel.
    pub(super) fn take(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        let start = Instant::now();
        let mut queues = self.lock();
        loop {
            let queue = queues.get_mut(&(from, channel));
            if let Some(data) = queue.and_then(VecDeque::pop_front) {
                return Ok(data);
            }
            self.check(what)?;
            let waited = start.elapsed();
            if waited >= self.timeout {
                return Err(CommError::Timeout {
                    rank: self.rank,
                    peer: from,
                    collective: what.to_owned(),
                    waited: self.timeout,
                });
            }
            queues = self
                .arrived
                .wait_timeout(queues, self.timeout - waited)
                .map_or_else(|e| e.into_inner().0, |(queues, _)| queues);
        }
    }

    /// Ignores poisoning: every change is a single push or pop, so a panic leaves the queues valid.
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
