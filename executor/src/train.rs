//! Runs a job: one thread per rank, one result.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::comm::{Communicator, local};
use plans::Timeline;
use sha2::{Digest, Sha256};

use crate::error::ExecutorError;
use crate::job::Job;
use crate::mesh::Mesh;
use crate::rank::{Rank, RankReport};

/// What training left.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Mean loss of every step.
    pub losses: Vec<f64>,
    /// Global gradient norm of every step.
    pub gradient_norms: Vec<f64>,
    /// Seconds of every step: the slowest rank's.
    pub step_times: Vec<f64>,
    /// SHA-256 of all weights in 32 bits, little-endian, by name in byte order.
    pub weights_sha256: String,
    /// Every rank.
    pub ranks: Vec<RankReport>,
}

/// All weights, whole, by name.
pub type WholeWeights = BTreeMap<String, Vec<f32>>;

/// What a run does beside training.
pub trait Observer: Sync {
    /// A step is done.
    fn step(&self, step: u64, loss: f64);
}

/// Trains with all ranks as threads of this process.
///
/// # Errors
/// The first failure of any rank.
pub fn train(job: &Job, observer: &dyn Observer) -> Result<(Outcome, WholeWeights), ExecutorError> {
    let mesh = Mesh::new(&job.strategy);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / mesh.world()).max(1);
    let ranks = local::world(mesh.world(), job.settings.timeout);
    let results: Vec<Result<_, ExecutorError>> = std::thread::scope(|scope| {
        let handles: Vec<_> = ranks
            .iter()
            .map(|comm| {
                let mesh = &mesh;
                scope.spawn(move || guarded(comm, || one_rank(job, mesh, comm, threads, observer)))
            })
            .collect();
        let join = |(rank, handle): (usize, std::thread::ScopedJoinHandle<'_, _>)| {
            handle.join().unwrap_or_else(|_| {
                Err(ExecutorError::Panic {
                    rank,
                    message: "outside its work".to_owned(),
                })
            })
        };
        handles.into_iter().enumerate().map(join).collect()
    });
    first_cause(&results)?;
    let mut reports = Vec::new();
    let mut whole = WholeWeights::new();
    for result in results.into_iter().flatten() {
        reports.push(result.0);
        whole.extend(result.1);
    }
    Ok((outcome(reports, &whole), whole))
}

/// Runs a rank; its failure, or its panic, stops the others.
fn guarded<T>(
    comm: &dyn Communicator,
    work: impl FnOnce() -> Result<T, ExecutorError>,
) -> Result<T, ExecutorError> {
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or(payload.downcast_ref::<&str>().copied());
        Err(ExecutorError::Panic {
            rank: comm.rank(),
            message: text.unwrap_or("without a message").to_owned(),
        })
    });
    if let Err(error) = &result {
        comm.fail(&error.to_string());
    }
    result
}

/// The failure that others followed from, if any rank failed.
fn first_cause<T>(results: &[Result<T, ExecutorError>]) -> Result<(), ExecutorError> {
    let follows = |error: &ExecutorError| error.to_string().contains("because rank");
    let mut errors = results.iter().filter_map(|r| r.as_ref().err());
    let first = errors.clone().find(|e| !follows(e));
    match first.or(errors.next()) {
        Some(error) => Err(error.clone()),
        None => Ok(()),
    }
}

fn one_rank(
    job: &Job,
    mesh: &Mesh,
    comm: &dyn Communicator,
    threads: usize,
    observer: &dyn Observer,
) -> Result<(RankReport, WholeWeights), ExecutorError> {
    let mut rank = Rank::new(job, mesh, comm, threads)?;
    for step in 0..job.settings.steps {
        let loss = rank.step(step)?;
        if comm.rank() == 0 {
            observer.step(step, loss);
        }
    }
    let whole = gather_weights(&rank)?;
    Ok((rank.report(), whole))
}

/// All weights on rank 0; nothing on the others.
fn gather_weights(rank: &Rank<'_>) -> Result<WholeWeights, ExecutorError> {
    let comm = rank.comm();
    let mut bytes = Vec::new();
    let tp = rank.place().tp;
    for states in rank.stages() {
        states.own_runs(|slot, name, first, [master, ..]| {
            if states.speaks_for(slot, tp) {
                let global: u64 = slot.global.iter().product();
                for number in [name.len() as u64, global, first, master.len() as u64] {
                    bytes.extend(number.to_le_bytes());
                }
                bytes.extend(name.as_bytes());
                bytes.extend_from_slice(bytemuck::cast_slice(master));
            }
        });
    }
    let message = std::sync::Arc::new(bytes);
    let channel = u64::MAX;
    comm.send(0, channel, "weights", message)?;
    let mut whole = WholeWeights::new();
    if comm.rank() != 0 {
        return Ok(whole);
    }
    for peer in 0..rank.world().size() {
        let arrived = comm.receive(peer, channel, "weights")?;
        let mut bytes = arrived.as_slice();
        while !bytes.is_empty() {
            let mut word = || {
                let (first, rest) = bytes.split_at(8);
                bytes = rest;
                u64::from_le_bytes(first.try_into().expect("eight bytes")) as usize
            };
            let [name, global, first, len] = [word(), word(), word(), word()];
            let (text, rest) = bytes.split_at(name);
            let (values, rest) = rest.split_at(4 * len);
            bytes = rest;
            let name = String::from_utf8_lossy(text).into_owned();
            let tensor = whole.entry(name).or_insert_with(|| vec![0.0; global]);
            for (x, value) in tensor[first..first + len]
                .iter_mut()
                .zip(values.chunks_exact(4))
            {
                *x = f32::from_le_bytes(value.try_into().expect("four bytes"));
            }
        }
    }
    Ok(whole)
}

fn outcome(ranks: Vec<RankReport>, whole: &WholeWeights) -> Outcome {
    let mut digest = Sha256::new();
    for (name, values) in whole {
        digest.update(name.as_bytes());
        digest.update(bytemuck::cast_slice::<f32, u8>(values));
    }
    let steps = ranks[0].step_times.len();
    let slowest = |step: usize| ranks.iter().map(|r| r.step_times[step]).fold(0.0, f64::max);
    Outcome {
        losses: ranks[0].losses.clone(),
        gradient_norms: ranks[0].gradient_norms.clone(),
        step_times: (0..steps).map(slowest).collect(),
        weights_sha256: digest
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect(),
        ranks,
    }
}

impl Outcome {
    /// The last step as it ran, one representative per pipeline rank.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        let mut first: BTreeMap<u64, &RankReport> = BTreeMap::new();
        for rank in &self.ranks {
            first.entry(rank.pp).or_insert(rank);
        }
        let mut events: Vec<_> = first.values().flat_map(|r| r.events.clone()).collect();
        events.sort_by(|a, b| {
            let key = |e: &plans::Event| (e.rank, e.stream);
            key(a).cmp(&key(b)).then(a.start.0.total_cmp(&b.start.0))
        });
        Timeline {
            ranks: first.len() as u32,
            events,
            memory: Vec::new(),
        }
    }
}
