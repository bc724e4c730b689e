//! Runs many shards, each in its own process. If an input ends or hangs its process, the shard runs
//! again and names every input to find it; then it continues behind that input.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::guard::{Fault, Finding};
use crate::rng::hash;
use crate::shard::{Order, Report};

/// The targets and sizes of a campaign.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Path of this program, which is started for every shard.
    pub program: PathBuf,
    /// Targets by name.
    pub targets: Vec<String>,
    /// Seed of every input.
    pub seed: u64,
    /// Inputs of every target at least.
    pub inputs: u64,
    /// Time that is used up, in turns, after that.
    pub time: Duration,
    /// Processes at a time.
    pub jobs: usize,
}

/// The sums over a target's shards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The target.
    pub target: String,
    /// Results of the inputs that were run.
    pub report: Report,
    /// Next input.
    next: u64,
}

/// A line that a shard's process prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The input that runs next, when that was asked for.
    Next(Vec<u8>),
    /// An input that does not end; the process gives up.
    Hang(Vec<u8>),
    /// All inputs were run; these are the results.
    Done(Report),
}

/// Inputs of one process at most.
const SHARD: u64 = 10_000;
/// Time of one process at most.
const SHARD_TIME: Duration = Duration::from_secs(30);

/// Runs a plan. `told` is called with the target and report of every process that ended.
pub fn run(plan: &Plan, told: &(dyn Fn(&str, &Report) + Sync)) -> Vec<Row> {
    let rows: Vec<Mutex<Row>> = plan
        .targets
        .iter()
        .map(|target| {
            Mutex::new(Row {
                target: target.clone(),
                ..Row::default()
            })
        })
        .collect();
    let start = Instant::now();
    let turn = Mutex::new(0usize);
    std::thread::scope(|scope| {
        for _ in 0..plan.jobs.max(1) {
            scope.spawn(|| {
                while let Some((at, order)) = next(plan, &rows, &turn, start) {
                    let report = shard(plan, &order);
                    told(&order.target, &report);
                    lock(&rows[at]).report.add(report);
                }
            });
        }
    });
    rows.into_iter()
        .map(|row| row.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The next shard: of a target that has had too few inputs, then of each in turn until time is up.
fn next(
    plan: &Plan,
    rows: &[Mutex<Row>],
    turn: &Mutex<usize>,
    start: Instant,
) -> Option<(usize, Order)> {
    let mut turn = lock(turn);
    let left = plan.time.saturating_sub(start.elapsed());
    let least = rows.iter().position(|row| lock(row).next < plan.inputs);
    let (at, time) = match least {
        Some(at) => (at, SHARD_TIME * 20),
        None if left.is_zero() => return None,
        None => {
            *turn += 1;
            let fair = plan.time / (rows.len() as u32 + 1);
            (
                *turn % rows.len(),
                SHARD_TIME.min(left).min(fair.max(Duration::from_secs(1))),
            )
        }
    };
    let mut row = lock(&rows[at]);
    let wanted = plan.inputs.saturating_sub(row.next);
    let count = if wanted > 0 {
        wanted.min(SHARD)
    } else {
        SHARD * 20
    };
    let from = row.next;
    row.next += count;
    Some((
        at,
        Order {
            target: row.target.clone(),
            seed: plan.seed,
            from,
            count,
            time,
        },
    ))
}

/// Runs a shard, going on behind every input that ends its process.
fn shard(plan: &Plan, order: &Order) -> Report {
    let mut report = Report::default();
    let mut order = order.clone();
    for _ in 0..20 {
        let (lines, ended) = process(plan, &order, false);
        match lines.into_iter().next_back() {
            Some(Line::Done(done)) => {
                report.add(done);
                return report;
            }
            Some(Line::Hang(input)) => {
                let message = "it did not end".to_owned();
                report
                    .findings
                    .push(fault(&order, Fault::Hang, message, input));
            }
            _ => {
                // Which input it was: the last one named when the shard runs again.
                let (named, _) = process(plan, &order, true);
                let last = named.into_iter().next_back();
                let input = match last {
                    Some(Line::Next(input) | Line::Hang(input)) => input,
                    _ => Vec::new(),
                };
                report
                    .findings
                    .push(fault(&order, Fault::Abort, ended, input));
            }
        }
        // Another seed for the rest: the same inputs would end it again.
        order.seed = hash(&order.seed.to_le_bytes());
        order.count /= 2;
    }
    report
}

fn fault(order: &Order, fault: Fault, message: String, input: Vec<u8>) -> Finding {
    Finding {
        target: order.target.clone(),
        fault,
        message,
        input,
    }
}

/// Runs a process for a shard; returns the last line it printed, if readable, and how it ended.
fn process(plan: &Plan, order: &Order, named: bool) -> (Vec<Line>, String) {
    let mut command = Command::new(&plan.program);
    command.args(["--worker", "--target", &order.target]);
    command.args([
        "--seed",
        &order.seed.to_string(),
        "--from",
        &order.from.to_string(),
    ]);
    command.args(["--inputs", &order.count.to_string()]);
    command.args(["--seconds", &order.time.as_secs_f64().to_string()]);
    if named {
        command.arg("--named");
    }
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return (Vec::new(), error.to_string()),
    };
    let mut last = None;
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            if !line.is_empty() {
                last = Some(line);
            }
        }
    }
    let ended = child.wait_with_output();
    let ended = ended.map_or_else(
        |e| e.to_string(),
        |o| format!("{}: {}", o.status, String::from_utf8_lossy(&o.stderr)),
    );
    let line = last.and_then(|line| serde_json::from_str(&line).ok());
    (line.into_iter().collect(), ended)
}
