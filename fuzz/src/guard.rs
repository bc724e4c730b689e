//! Runs one input such that it cannot end the program: panics are caught, time and memory are
//! measured.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::memory;
use crate::outcome::{Outcome, kind};
use crate::target::{Depth, MOST_TIME, Target};

/// Most memory that one input may take.
pub const MOST_MEMORY: u64 = 1 << 30;

/// A fault in the treatment of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// It panicked.
    Panic,
    /// A promise was broken.
    Invariant,
    /// It took longer than [`MOST_TIME`].
    Slow,
    /// It took more than [`MOST_MEMORY`].
    Memory,
    /// It did not end.
    Hang,
    /// The code under test ended the process.
    Abort,
}

/// A fault with the input that shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The target.
    pub target: String,
    /// The fault.
    pub fault: Fault,
    /// In words, with the place of a panic.
    pub message: String,
    /// The input.
    pub input: Vec<u8>,
}

impl Finding {
    /// Findings with the same key are taken to have the same cause.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{:?} {}", self.fault, kind(&self.message))
    }
}

/// One input's run.
#[derive(Debug)]
pub struct Run {
    /// The outcome; `None` after a panic.
    pub outcome: Option<Outcome>,
    /// Time taken.
    pub time: Duration,
    /// Most bytes held.
    pub peak: u64,
    /// Faults, with their messages.
    pub faults: Vec<(Fault, String)>,
}

static LAST_PANIC: Mutex<String> = Mutex::new(String::new());
static HOOK: Once = Once::new();

/// Inputs that run now.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// From here on a panic during an input is remembered, not printed.
fn remember_panics() {
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |info| {
            if RUNNING.load(Ordering::SeqCst) == 0 {
                return print(info);
            }
            let mut last = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
            *last = info.to_string().replace('\n', " ");
        }));
    });
}

/// Runs one input.
pub fn run(target: &Target, input: &[u8], depth: Depth) -> Run {
    remember_panics();
    RUNNING.fetch_add(1, Ordering::SeqCst);
    let start = Instant::now();
    let (caught, peak) =
        memory::peak_of(|| catch_unwind(AssertUnwindSafe(|| (target.run)(input, depth))));
    RUNNING.fetch_sub(1, Ordering::SeqCst);
    let time = start.elapsed();
    let mut faults = Vec::new();
    let outcome = match caught {
        Ok(outcome) => {
            let broken = outcome.violations.iter();
            faults.extend(broken.map(|message| (Fault::Invariant, message.clone())));
            Some(outcome)
        }
        Err(_) => {
            let last = LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner);
            faults.push((Fault::Panic, last.clone()));
            None
        }
    };
    if peak > MOST_MEMORY {
        faults.push((Fault::Memory, format!("{} MiB were held", peak >> 20)));
    }
    Run {
        outcome,
        time,
        peak,
        faults,
    }
}

/// Whether an input really takes too long: the shortest of three runs counts, because the machine may
/// have been busy with something else.
pub fn is_slow(target: &Target, input: &[u8], depth: Depth) -> bool {
    (0..3).all(|_| run(target, input, depth).time > target.most_time)
}

/// Removes pieces from an input as long as it shows the same fault.
pub fn minimised(target: &Target, finding: &Finding, depth: Depth) -> Vec<u8> {
    let key = finding.key();
    let shows = |input: &[u8]| {
        let run = run(target, input, depth);
        run.faults.into_iter().any(|(fault, message)| {
            let other = Finding {
                fault,
                message,
                input: Vec::new(),
                target: String::new(),
            };
            other.key() == key
        })
    };
    let deadline = Instant::now() + MOST_TIME;
    let mut best = finding.input.clone();
    let mut size = best.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < best.len() && Instant::now() < deadline {
            let mut shorter = best.clone();
            shorter.drain(at..(at + size).min(best.len()));
            if shows(&shorter) {
                best = shorter;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    best
}
