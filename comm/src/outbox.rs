//! The queue of messages to one peer, which a thread writes to the connection. Sending therefore never blocks, and a
//! rank can report its failure to the others even while one of them does not read.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::communicator::Message;
use super::frames::{self, DONE, FAILED};

/// Messages to be written to a peer, in order.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<(u64, Message)>,
    /// Whether a frame is being written.
    writing: bool,
    /// Whether the queue is closed: nothing comes after these frames.
    ending: bool,
    /// Whether a write to the peer failed; no more are tried then.
    broken: bool,
}

impl Outbox {
    /// Adds a message; returns false if it cannot be sent any more.
    pub(super) fn put(&self, channel: u64, data: Message) -> bool {
        let mut state = self.lock();
        if state.ending || state.broken {
            return false;
        }
        state.frames.push_back((channel, data));
        self.changed.notify_all();
        true
    }

    /// After the queued messages, tells the peer that this rank is done.
    pub(super) fn end(&self) {
        if self.put(DONE, Message::default()) {
            self.lock().ending = true;
            self.changed.notify_all();
        }
    }

    /// Drops the queued messages and tells the peer which rank failed, and why.
    pub(super) fn fail(&self, failed: usize, reason: &str) {
        let mut state = self.lock();
        if state.ending {
            return;
        }
        state.frames.clear();
        let words = Arc::new(frames::last_words(failed, reason));
        state.frames.push_back((FAILED, words));
        state.ending = true;
        self.changed.notify_all();
    }

    /// Waits for the next frame to write; `None` after the last.
    pub(super) fn next(&self) -> Option<(u64, Message)> {
        let mut state = self.lock();
        loop {
            if let Some(frame) = state.frames.pop_front() {
                state.writing = true;
                return Some(frame);
            }
            if state.ending {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that the frame was written, or failed.
    pub(super) fn wrote(&self, whole: bool) {
        let mut state = self.lock();
        state.writing = false;
        if !whole {
            state.broken = true;
            state.frames.clear();
        }
        self.changed.notify_all();
    }

    /// Waits until everything is written or nothing can be, at most until the deadline.
    pub(super) fn drain(&self, until: Instant) {
        let mut state = self.lock();
        while state.writing || !state.frames.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .map_or_else(|e| e.into_inner().0, |(state, _)| state);
        }
    }

    /// Ignores poisoning: every change is a single push or pop, so a panic leaves the frames valid.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
