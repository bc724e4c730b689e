//! Runs a job with one thread per rank.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Scope, ScopedJoinHandle};

use comm::{Communicator, local};
use cpu_device::Watch;
use plans::Timeline;
use sha2::{Digest, Sha256};

use crate::checkpoint::{
    self, Claim, Manifest, Memory, Piece, RunIdentity, Source, Store, Written,
};
use crate::device::{Cores, Device, Devices};
use crate::error::ExecutorError;
use crate::job::Job;
use crate::mesh::Mesh;
use crate::rank::Rank;
use crate::report::{RankReport, StepReport};

/// Channel on which ranks tell rank 0 which files they wrote.
const FILES: u64 = 50;

/// The result of training.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Mean loss of each step.
    pub losses: Vec<f64>,
    /// Global gradient norm of each step.
    pub gradient_norms: Vec<f64>,
    /// Duration of each step in seconds, on the slowest rank.
    pub step_times: Vec<f64>,
    /// The report of every rank.
    pub ranks: Vec<RankReport>,
    /// Final weights and optimizer states, by global name.
    pub states: Memory,
}

/// A run of a job.
#[derive(Clone, Copy)]
pub struct Session<'a> {
    /// The job to run.
    pub job: &'a Job,
    /// The source of the initial states, and how many steps they have seen; `None` to start from scratch.
    pub start: Option<(&'a dyn Source, u64)>,
    /// Where and how often to save, if at all.
    pub checkpoints: Option<&'a Checkpoints>,
    /// Receives progress.
    pub observer: &'a dyn Observer,
    /// Called after every operator, if given.
    pub watch: Option<&'a (dyn Watch + Sync)>,
}

/// Where and how often to save checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    /// Folder of checkpoints.
    pub dir: PathBuf,
    /// Steps between two checkpoints; the end of training is always saved.
    pub every: u64,
    /// Identity of the run, written to manifests; absent if unknown.
    pub run: Option<RunIdentity>,
}

impl Checkpoints {
    /// Checkpoints of a job.
    #[must_use]
    pub fn of(job: &Job, dir: &Path, every: u64) -> Self {
        Self {
            dir: dir.to_owned(),
            every,
            run: Some(RunIdentity::of(job)),
        }
    }
}

/// Receives the progress of a run.
pub trait Observer: Sync {
    /// Called when a step is done.
    fn step(&self, report: &StepReport);
    /// Called when a checkpoint is complete.
    fn saved(&self, _path: &Path) {}
}

/// Trains on the CPU with all ranks as threads of this process.
///
/// # Errors
/// The first failure of any rank.
pub fn train(session: &Session<'_>) -> Result<Outcome, ExecutorError> {
    let ranks = session.job.strategy.world() as usize;
    train_on(&Cores::among(ranks), session)
}

/// Trains with all ranks as threads of this process.
///
/// # Errors
/// The first failure of any rank.
pub fn train_on(devices: &impl Devices, session: &Session<'_>) -> Result<Outcome, ExecutorError> {
    let job = session.job;
    let mesh = Mesh::new(&job.strategy);
    let _claimed = prepare(session)?;
    let ranks = local::world(mesh.world(), job.settings.timeout);
    let results: Vec<Result<_, ExecutorError>> = std::thread::scope(|scope| {
        let handles: Vec<_> = ranks
            .iter()
            .map(|comm| {
                let mesh = &mesh;
                scope.spawn(move || guarded(comm, || one_rank(devices, session, mesh, comm)))
            })
            .collect();
        let join = |(rank, handle): (usize, ScopedJoinHandle<'_, _>)| {
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
    Ok(outcome(results.into_iter().flatten()))
}

/// Combines the results of all ranks, in rank order.
pub(crate) fn outcome(results: impl Iterator<Item = (RankReport, Vec<Piece>)>) -> Outcome {
    let mut states = Memory::default();
    let reports = results.map(|(report, pieces)| {
        states.add(pieces);
        report
    });
    let reports: Vec<RankReport> = reports.collect();
    let steps = reports[0].step_times.len();
    let slowest = |step: usize| {
        reports
            .iter()
            .map(|r| r.step_times[step])
            .fold(0.0, f64::max)
    };
    Outcome {
        losses: reports[0].losses.clone(),
        gradient_norms: reports[0].gradient_norms.clone(),
        step_times: (0..steps).map(slowest).collect(),
        ranks: reports,
        states,
    }
}

/// Makes the folder of checkpoints, cleans up after an interrupted save, and refuses to mix this run's checkpoints
/// with another's: no other run may save in a folder, and the latest there must be the one to resume from. Holds the folder until
/// the value returned is dropped.
pub(crate) fn prepare<'a>(session: &Session<'a>) -> Result<Option<Claim<'a>>, ExecutorError> {
    let Some(checkpoints) = session.checkpoints else {
        return Ok(None);
    };
    let dir = &checkpoints.dir;
    let store = Store::new(dir);
    let claimed = store.claim()?;
    let first = session.start.map_or(0, |(_, step)| step);
    let refused = |step: u64, of: &str, how: &str| ExecutorError::Checkpoint {
        path: dir.display().to_string(),
        reason: format!("holds step {step} of {of}, expected {how}"),
    };
    for (step, folder) in checkpoint::all(dir)? {
        if first == 0 {
            let how = "--resume to go on from it, or another folder";
            return Err(refused(step, "an earlier run", how));
        }
        // Earlier ones belong to this run or were overruled with --force-resume; a damaged one belongs to no run.
        let of_another = step > first
            && Manifest::read(&folder).is_ok_and(|manifest| {
                let ours = (&checkpoints.run, session.job.settings.seed);
                manifest.run.is_some() && (&manifest.run, manifest.seed) != ours
            });
        if of_another {
            let how = format!(
                "another folder: it would be taken for a later one than step {first} of this run"
            );
            return Err(refused(step, "another run", &how));
        }
    }
    store.recover()?;
    Ok(Some(claimed))
}

/// Runs a rank's work; its failure or panic is reported to the other ranks.
pub(crate) fn guarded<T>(
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

/// Fails with the first failure that no other rank's failure caused, if any rank failed.
fn first_cause<T>(results: &[Result<T, ExecutorError>]) -> Result<(), ExecutorError> {
    let mut errors = results.iter().filter_map(|r| r.as_ref().err());
    let first = errors.clone().find(|e| !e.follows());
    match first.or(errors.next()) {
        Some(error) => Err(error.clone()),
        None => Ok(()),
    }
}

pub(crate) fn one_rank(
    devices: &impl Devices,
    session: &Session<'_>,
    mesh: &Mesh,
    comm: &dyn Communicator,
) -> Result<(RankReport, Vec<Piece>), ExecutorError> {
    let job = session.job;
    computes(devices, job)?;
    let mut rank = Rank::new(job, mesh, comm, devices, session.watch)?;
    let mut first = 0;
    if let Some((source, step)) = session.start {
        rank.load(source)?;
        first = step;
    }
    std::thread::scope(|scope| {
        // A failure must reach the others before this scope joins a save that waits for them.
        guarded(comm, || steps(session, &mut rank, comm, first, scope))
    })?;
    let pieces = rank.pieces()?;
    Ok((rank.report(), pieces))
}

/// Rejects a precision that the devices cannot compute in.
fn computes<D: Devices>(_: &D, job: &Job) -> Result<(), ExecutorError> {
    let here = <D::Device<'_> as Device>::PRECISIONS;
    if here.contains(&job.precision) {
        return Ok(());
    }
    let names: Vec<&str> = here.iter().map(|p| p.name()).collect();
    Err(ExecutorError::Device {
        reason: format!(
            "precision {}: the {} device computes in {}",
            job.precision.name(),
            <D::Device<'_> as Device>::NAME,
            names.join(", ")
        ),
    })
}

/// A thread that writes a checkpoint while training continues.
type Writer<'scope> = ScopedJoinHandle<'scope, Result<(), ExecutorError>>;

/// Trains from step `first` on, then waits until the last checkpoint is written.
///
/// If a step of this rank fails, it still waits before it tells the other ranks, which would
/// otherwise stop writing an earlier step's checkpoint. It does not wait if another rank failed.
fn steps<'scope>(
    session: &'scope Session<'scope>,
    rank: &mut Rank<'_, impl Device>,
    comm: &'scope dyn Communicator,
    first: u64,
    scope: &'scope Scope<'scope, '_>,
) -> Result<(), ExecutorError> {
    let mut writer = None;
    let trained = each_step(session, rank, comm, first, scope, &mut writer);
    match trained {
        Err(error) if error.of_ranks().is_some() => Err(error),
        ended => {
            let saved = join(writer);
            ended.and(saved)
        }
    }
}

/// Trains the steps. A checkpoint is copied at the end of its step and written in the background, by `writer`, while
/// training continues.
fn each_step<'scope>(
    session: &'scope Session<'scope>,
    rank: &mut Rank<'_, impl Device>,
    comm: &'scope dyn Communicator,
    first: u64,
    scope: &'scope Scope<'scope, '_>,
    writer: &mut Option<Writer<'scope>>,
) -> Result<(), ExecutorError> {
    let job = session.job;
    if let Some(checkpoints) = session.checkpoints.filter(|_| first >= job.last_step()) {
        // Nothing left to train: save the loaded states in this layout.
        return save(session, comm, checkpoints, first, &rank.pieces()?);
    }
    for step in first..job.last_step() {
        let report = rank.step(step)?;
        if comm.rank() == 0 {
            session.observer.step(&report);
        }
        let Some(checkpoints) = session.checkpoints else {
            continue;
        };
        let done = step + 1;
        if done == job.last_step() || (checkpoints.every > 0 && done % checkpoints.every == 0) {
            join(writer.take())?;
            let pieces = rank.pieces()?;
            *writer = Some(scope.spawn(move || save(session, comm, checkpoints, done, &pieces)));
        }
    }
    Ok(())
}

fn join(writer: Option<Writer<'_>>) -> Result<(), ExecutorError> {
    match writer.map(ScopedJoinHandle::join) {
        Some(Ok(result)) => result,
        Some(Err(_)) => Err(ExecutorError::Unsaved {
            path: "checkpoint".to_owned(),
            reason: "the thread that wrote it panicked".to_owned(),
        }),
        None => Ok(()),
    }
}

/// Writes a rank's file; once every rank has, rank 0 completes the checkpoint and tells the others. If one fails, all
/// remove what they wrote.
fn save(
    session: &Session<'_>,
    comm: &dyn Communicator,
    checkpoints: &Checkpoints,
    step: u64,
    pieces: &[Piece],
) -> Result<(), ExecutorError> {
    let store = Store::new(&checkpoints.dir);
    let saved = match comm.rank() {
        0 => save_all(session, comm, checkpoints, (step, pieces)),
        rank => store.write_rank(step, rank, pieces).and_then(|written| {
            let message = serde_json::to_vec(&written).expect("names and numbers become JSON");
            comm.send(0, FILES, "checkpoint", Arc::new(message))?;
            comm.receive(0, FILES, "checkpoint")?;
            Ok(())
        }),
    };
    let saved = saved.map_err(ExecutorError::while_saving);
    if saved.is_err() {
        // The others learn of it from this rank's failure; the last rank to clean up removes the folder.
        let rank = comm.rank();
        store.abandon(step, Some(rank).filter(|&rank| rank > 0));
    }
    saved
}

/// Rank 0's part of [`save`].
fn save_all(
    session: &Session<'_>,
    comm: &dyn Communicator,
    checkpoints: &Checkpoints,
    (step, pieces): (u64, &[Piece]),
) -> Result<(), ExecutorError> {
    let job = session.job;
    let store = Store::new(&checkpoints.dir);
    let Written {
        file,
        mut parameters,
    } = store.write_rank(step, 0, pieces)?;
    let mut files = vec![file];
    for from in 1..comm.world() {
        let bytes = comm.receive(from, FILES, "checkpoint")?;
        let written: Written = serde_json::from_slice(&bytes).expect("what a rank wrote");
        files.push(written.file);
        parameters.extend(written.parameters);
    }
    let names = (job.model.name.clone(), job.strategy.to_string());
    let of = (step, job.settings.seed);
    let manifest = Manifest::new(of, names, checkpoints.run.clone(), (files, parameters));
    let path = store.finish(&manifest)?;
    session.observer.saved(&path);
    for to in 1..comm.world() {
        comm.send(to, FILES, "checkpoint", Arc::default())?;
    }
    Ok(())
}

impl Outcome {
    /// SHA-256 of all fp32 weights, little-endian, each after its name, in order of name.
    #[must_use]
    pub fn weights_sha256(&self) -> String {
        let mut digest = Sha256::new();
        for (name, (_, values)) in self.states.weights() {
            digest.update(name.as_bytes());
            digest.update(bytemuck::cast_slice::<f32, u8>(&values));
        }
        checkpoint::hex_of(digest)
    }

    /// Timeline of the last step, with one representative per pipeline rank.
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
