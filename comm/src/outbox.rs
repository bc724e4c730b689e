//! Messages on their way to one peer: whoever sends puts them here, and a thread writes them. So sending waits
//! for nobody, and a rank can tell the others that it failed while one of them takes nothing.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::communicator::Message;
use super::frames::{self, DONE, FAILED};

/// What is to be written to a peer, in order.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<(u64, Message)>,
    /// A frame is being written.
    writing: bool,
    /// Nothing comes after these frames.
    ending: bool,
    /// Whether a write to the peer failed, after which none is tried.
    broken: bool,
}

impl Outbox {
    /// Adds a message; false when it will not leave.
    pub(super) fn put(&self, channel: u64, data: Message) -> bool {
        let mut state = self.lock();
        if state.ending || state.broken {
            return false;
        }
        state.frames.push_back((channel, data));
        self.changed.notify_all();
        true
    }

    /// After what is here, says that this rank is done.
    pub(super) fn end(&self) {
        if self.put(DONE, Message::default()) {
            self.lock().ending = true;
            self.changed.notify_all();
        }
    }

    /// Instead of what is here, says why this rank failed.
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

    /// Waits for the next frame to write; nothing after the last.
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

    /// The frame has been written, or cannot be.
    pub(super) fn wrote(&self, whole: bool) {
        let mut state = self.lock();
        state.writing = false;
        if !whole {
            state.broken = true;
            state.frames.clear();
        }
        self.changed.notify_all();
    }

    /// Waits until everything is written or nothing can be, but not beyond a moment.
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

    /// A thread that panicked leaves its frames whole: every change to them is one push or pop.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
