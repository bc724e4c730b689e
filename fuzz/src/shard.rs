//! Runs many inputs of one target in one process.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::guard::{self, Fault, Finding};
use crate::rng::{Rng, hash};
use crate::target::{Depth, Pool, Target};

/// Which inputs to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The target's name.
    pub target: String,
    /// Seed of the campaign.
    pub seed: u64,
    /// First input.
    pub from: u64,
    /// Largest number of inputs.
    pub count: u64,
    /// Longest time for all of them.
    pub time: Duration,
}

/// The results of an order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Inputs run.
    pub inputs: u64,
    /// Inputs with valid syntax.
    pub syntax: u64,
    /// Inputs that were accepted.
    pub accepted: u64,
    /// Inputs that were followed through pricing and export.
    pub used: u64,
    /// Hashes of the outcome classes.
    pub classes: BTreeSet<u64>,
    /// Longest time of one input, in milliseconds.
    pub slowest_ms: u64,
    /// Most bytes that one input held.
    pub peak: u64,
    /// Faults, one of each kind.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Counts an input's run; returns whether no earlier outcome was of its class.
    fn count(&mut self, run: &guard::Run, depth: Depth) -> bool {
        self.inputs += 1;
        self.slowest_ms = self.slowest_ms.max(run.time.as_millis() as u64);
        self.peak = self.peak.max(run.peak);
        let Some(outcome) = &run.outcome else {
            return false;
        };
        self.syntax += u64::from(outcome.syntax);
        self.accepted += u64::from(outcome.accepted);
        self.used += u64::from(outcome.accepted && depth == Depth::Use);
        self.classes.insert(hash(outcome.class.as_bytes()))
    }

    /// Adds another report.
    pub fn add(&mut self, other: Self) {
        self.inputs += other.inputs;
        self.syntax += other.syntax;
        self.accepted += other.accepted;
        self.used += other.used;
        self.classes.extend(other.classes);
        self.slowest_ms = self.slowest_ms.max(other.slowest_ms);
        self.peak = self.peak.max(other.peak);
        let known: BTreeSet<String> = self.findings.iter().map(Finding::key).collect();
        let new = other
            .findings
            .into_iter()
            .filter(|f| !known.contains(&f.key()));
        self.findings.extend(new);
    }
}

/// The input that runs now, for a watchdog on another thread.
pub type Current = Arc<Mutex<Option<(Instant, Vec<u8>)>>>;

/// Runs an order. `each` is called with every input before it runs.
pub fn run(
    target: &Target,
    order: &Order,
    current: &Current,
    each: &mut dyn FnMut(&[u8]),
) -> Report {
    let mut pool = Pool::of((target.seeds)());
    let mut report = Report::default();
    let mut kinds: BTreeSet<String> = BTreeSet::new();
    let start = Instant::now();
    let mut accepted = order.from;
    for index in order.from..order.from.saturating_add(order.count) {
        if start.elapsed() > order.time {
            break;
        }
        let mut rng = Rng::of(order.seed, target.name, index);
        let input = (target.mutate)(&pool, &mut rng);
        let depth = if accepted.is_multiple_of(target.use_every) {
            Depth::Use
        } else {
            Depth::Read
        };
        each(&input);
        *current.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((Instant::now(), input.clone()));
        let mut run = guard::run(target, &input, depth);
        // Inputs that show the same fault are not looked at twice, however slow.
        if run.time > target.most_time && kinds.insert("slow".to_owned()) {
            if guard::is_slow(target, &input, depth) {
                let time = format!("{} s", run.time.as_secs());
                run.faults.push((Fault::Slow, time));
            } else {
                kinds.remove("slow");
            }
        }
        accepted += u64::from(run.outcome.as_ref().is_some_and(|o| o.accepted));
        if report.count(&run, depth) {
            pool.keep(input.clone());
        }
        for (fault, message) in run.faults {
            let finding = Finding {
                target: target.name.to_owned(),
                fault,
                message,
                input: input.clone(),
            };
            if kinds.insert(finding.key()) {
                let input = guard::minimised(target, &finding, depth);
                report.findings.push(Finding { input, ..finding });
            }
        }
    }
    *current.lock().unwrap_or_else(PoisonError::into_inner) = None;
    report
}
