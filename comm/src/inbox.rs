//! The messages that have arrived at a rank, and waiting for them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::communicator::{CommError, Message};

type Queues = HashMap<(usize, u64), VecDeque<Message>>;

/// One rank's received messages, queued in order per sender and channel.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    queues: Mutex<Queues>,
    arrived: Condvar,
}

/// The first failure of a job: rank and reason. Later failures follow from it.
pub(super) type Failure = OnceLock<(usize, String)>;

/// What a waiting rank needs to know: its number, the job's failure and the timeout.
#[derive(Clone, Copy)]
pub(super) struct Waiter<'w> {
    pub(super) rank: usize,
    pub(super) failed: &'w Failure,
    pub(super) timeout: Duration,
}

impl Waiter<'_> {
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
}

impl Inbox {
    pub(super) fn put(&self, from: usize, channel: u64, data: Message) {
        self.lock()
            .entry((from, channel))
            .or_default()
            .push_back(data);
        self.arrived.notify_all();
    }

    /// Waits for the next message from a sender on a channel.
    pub(super) fn take(
        &self,
        waiter: &Waiter<'_>,
        (from, channel): (usize, u64),
        what: &str,
    ) -> Result<Message, CommError> {
        let start = Instant::now();
        let mut queues = self.lock();
        loop {
            let queue = queues.get_mut(&(from, channel));
            if let Some(data) = queue.and_then(VecDeque::pop_front) {
                return Ok(data);
            }
            waiter.check(what)?;
            let waited = start.elapsed();
            if waited >= waiter.timeout {
                return Err(CommError::Timeout {
                    rank: waiter.rank,
                    peer: from,
                    collective: what.to_owned(),
                    waited: waiter.timeout,
                });
            }
            queues = self
                .arrived
                .wait_timeout(queues, waiter.timeout - waited)
                .map_or_else(|e| e.into_inner().0, |(queues, _)| queues);
        }
    }

    /// Wakes all waiting threads so that they notice a failure.
    pub(super) fn wake(&self) {
        let _queues = self.lock();
        self.arrived.notify_all();
    }

    /// Ignores poisoning: every change is a single push or pop, so a panic leaves the queues valid.
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
