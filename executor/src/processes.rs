//! Runs a job in which this process is one rank.

use std::sync::Arc;

use comm::{Communicator, Group, Message, pack, unpack};
use sha2::{Digest, Sha256};

use crate::checkpoint::Piece;
use crate::device::Devices;
use crate::error::ExecutorError;
use crate::mesh::Mesh;
use crate::report::RankReport;
use crate::train::{Outcome, Session, guarded, one_rank, outcome, prepare};

/// Channel on which ranks check that they have the same job.
const JOBS: u64 = 51;
/// Channel on which ranks send their results to rank 0.
const RESULTS: u64 = 52;

/// Trains as rank `comm.rank()`. Rank 0 returns the result of training once every rank is done; the others return
/// `None`.
///
/// # Errors
/// When the number of ranks is not the plan's, when ranks have different jobs, or when this rank fails or stops
/// because another did.
pub fn train_rank(
    devices: &impl Devices,
    session: &Session<'_>,
    comm: &dyn Communicator,
) -> Result<Option<Outcome>, ExecutorError> {
    guarded(comm, || {
        let mesh = Mesh::new(&session.job.strategy);
        if comm.world() != mesh.world() {
            return Err(ExecutorError::World {
                planned: mesh.world(),
                started: comm.world(),
            });
        }
        same_job(session, comm)?;
        let _claimed = match comm.rank() {
            0 => prepare(session)?,
            _ => None,
        };
        everyone(comm).barrier(comm)?;
        let (report, pieces) = one_rank(devices, session, &mesh, comm)?;
        if comm.rank() > 0 {
            comm.send(0, RESULTS, "results", message(&report, &pieces))?;
            // Stay until rank 0 has received everything: this rank still carries messages.
            everyone(comm).barrier(comm)?;
            return Ok(None);
        }
        let mut results = vec![(report, pieces)];
        for from in 1..comm.world() {
            results.push(read(&comm.receive(from, RESULTS, "results")?));
        }
        everyone(comm).barrier(comm)?;
        Ok(Some(outcome(results.into_iter())))
    })
}

fn everyone(comm: &dyn Communicator) -> Group {
    Group {
        ranks: (0..comm.world()).collect(),
        index: comm.rank(),
        channel: JOBS,
    }
}

/// Checks that all ranks have the same plan, data and settings. Otherwise they would wait for each other forever or,
/// worse, train something that nobody asked for.
fn same_job(session: &Session<'_>, comm: &dyn Communicator) -> Result<(), ExecutorError> {
    let job = session.job;
    let parts: [(&'static str, String); 5] = [
        ("strategy", job.strategy.to_string()),
        ("model", format!("{:?}", job.model)),
        ("settings", format!("{:?}", job.settings)),
        (
            "batch",
            format!("{} {} {:?}", job.global_batch, job.seq_len, job.precision),
        ),
        ("data", job.data.digest()),
    ];
    let mut own = Vec::with_capacity(32 * parts.len());
    for (_, text) in &parts {
        own.extend_from_slice(&Sha256::digest(text.as_bytes()));
    }
    let own = Arc::new(own);
    let everyone = everyone(comm);
    let all = everyone.all_gather(comm, "comparing jobs", Arc::clone(&own))?;
    for (rank, theirs) in all.wait(comm)?.iter().enumerate() {
        for (index, (what, _)) in parts.iter().enumerate() {
            let part = 32 * index..32 * (index + 1);
            if theirs.get(part.clone()) != own.get(part) {
                return Err(ExecutorError::OtherJob {
                    rank: comm.rank(),
                    peer: rank,
                    what,
                });
            }
        }
    }
    Ok(())
}

/// Serialises a rank's results: lengths and names as JSON, then the numbers.
fn message(report: &RankReport, pieces: &[Piece]) -> Message {
    let heads: Vec<_> = pieces
        .iter()
        .map(|p| (&p.name, &p.global, &p.runs))
        .collect();
    let head = serde_json::to_vec(&(report, heads)).expect("names and numbers become JSON");
    let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
    bytes.extend(head);
    for piece in pieces {
        for data in &piece.data {
            bytes.extend_from_slice(&pack(data));
        }
    }
    Arc::new(bytes)
}

fn read(bytes: &[u8]) -> (RankReport, Vec<Piece>) {
    type Head = (RankReport, Vec<(String, Vec<u64>, Vec<[u64; 2]>)>);
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let (head, mut rest) = rest.split_at(length);
    let (report, heads): Head = serde_json::from_slice(head).expect("what a rank wrote");
    let pieces = heads
        .into_iter()
        .map(|(name, global, runs)| {
            let elements = runs.iter().map(|r| r[1] as usize).sum::<usize>();
            let data = [(); 3].map(|()| {
                let (here, after) = rest.split_at(4 * elements);
                rest = after;
                unpack(here)
            });
            Piece {
                name,
                global,
                runs,
                data,
            }
        })
        .collect();
    (report, pieces)
}
