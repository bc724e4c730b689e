//! Ranks as threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::{CommError, Communicator, Message};

type Queues = HashMap<(usize, u64), VecDeque<Message>>;

#[derive(Default)]
struct Mailbox {
    queues: Mutex<Queues>,
    arrived: Condvar,
}

struct Shared {
    boxes: Vec<Mailbox>,
    failed: OnceLock<(usize, String)>,
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
        boxes: (0..world).map(|_| Mailbox::default()).collect(),
        failed: OnceLock::new(),
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
    fn check(&self, what: &str) -> Result<(), CommError> {
        match self.shared.failed.get() {
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

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.boxes.len()
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.check(what)?;
        let mailbox = &self.shared.boxes[to];
        lock(&mailbox.queues)
            .entry((self.rank, channel))
            .or_default()
            .push_back(data);
        mailbox.arrived.notify_all();
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        let mailbox = &self.shared.boxes[self.rank];
        let start = Instant::now();
        let mut queues = lock(&mailbox.queues);
        loop {
            if let Some(data) = queues
                .get_mut(&(from, channel))
                .and_then(VecDeque::pop_front)
            {
                return Ok(data);
            }
            self.check(what)?;
            let waited = start.elapsed();
            if waited >= self.shared.timeout {
                return Err(CommError::Timeout {
                    rank: self.rank,
                    peer: from,
                    collective: what.to_owned(),
                    waited: self.shared.timeout,
                });
            }
            queues = mailbox
                .arrived
                .wait_timeout(queues, self.shared.timeout - waited)
                .map_or_else(|e| e.into_inner().0, |(queues, _)| queues);
        }
    }

    fn fail(&self, reason: &str) {
        // The first failure is the cause; later ones follow from it.
        let _ = self.shared.failed.set((self.rank, reason.to_owned()));
        for mailbox in &self.shared.boxes {
            let _queues = lock(&mailbox.queues);
            mailbox.arrived.notify_all();
        }
    }
}

/// A rank that panicked leaves its queues whole: every change to them is one push or pop.
fn lock(queues: &Mutex<Queues>) -> std::sync::MutexGuard<'_, Queues> {
    queues
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
