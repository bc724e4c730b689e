//! Runs whose ranks are processes that connect over TCP: started by torchrun, srun or mpirun, or this process and
//! others that it starts on this host.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use comm::CommError;
use comm::bootstrap::{Place, PlaceError};
use comm::secret::Secret;
use comm::tcp::TcpCommunicator;
use executor::device::Devices;
use executor::{ExecutorError, Outcome, Session};

use crate::error::CliError;

/// Interval at which processes are polled for their end.
const LOOK: Duration = Duration::from_millis(5);

/// Time for ranks that have learned of a failure to remove files they were writing.
const GRACE: Duration = Duration::from_millis(500);

/// Processes started here; any that outlive this rank by more than [`GRACE`] are killed.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        let until = Instant::now() + GRACE;
        for child in &mut self.0 {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(LOOK);
            }
            // It has ended already, or cannot be killed: nothing can be done either way.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Trains as one rank on the device of its place; rank 0 returns the outcome of training.
pub(crate) fn train<D: Devices>(
    session: &Session<'_>,
    devices: impl Fn(&Place) -> D,
) -> Result<Option<Outcome>, CliError> {
    let variable = |name: &str| std::env::var(name).ok();
    let (place, others) = match Place::new(variable) {
        Ok(place) => (place, Others(Vec::new())),
        Err(PlaceError::NoLauncher) => start(session.job.strategy.world() as usize)?,
        Err(error) => return Err(CliError::wrong("--communicator tcp", error.to_string())),
    };
    let comm = TcpCommunicator::join(&place, session.job.settings.timeout).map_err(failed)?;
    let trained = executor::train_rank(&devices(&place), session, &comm)?;
    drop(comm);
    finish(others, session.job.settings.timeout)?;
    Ok(trained)
}

/// Starts ranks 1 and up with this same command line, and returns where all of them connect.
fn start(world: usize) -> Result<(Place, Others), CliError> {
    let wrong = |e: std::io::Error| {
        CliError::wrong("--communicator tcp", format!("cannot start ranks: {e}"))
    };
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(wrong)?
        .port();
    let secret = Secret::random().map_err(|reason| failed(CommError::Start { reason }))?;
    let place = |rank| Place::of_this_host(rank, world, port, secret.clone());
    let program = std::env::current_exe().map_err(wrong)?;
    let mut others = Others(Vec::new());
    for rank in 1..world {
        let child = Command::new(&program)
            .args(std::env::args_os().skip(1))
            .envs(place(rank).variables())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(wrong)?;
        others.0.push(child);
    }
    Ok((place(0), others))
}

/// Waits for the other ranks to exit after training.
fn finish(mut others: Others, timeout: Duration) -> Result<(), CliError> {
    let until = Instant::now() + timeout;
    for (rank, child) in (1..).zip(&mut others.0) {
        let wrong = loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => break None,
                Ok(Some(status)) => break Some(format!("it ended with {status}")),
                Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
                Ok(None) => break Some(format!("it did not end in {} s", timeout.as_secs_f64())),
                Err(error) => break Some(error.to_string()),
            }
        };
        if let Some(reason) = wrong {
            return Err(failed(CommError::PeerFailed {
                rank: 0,
                collective: "ending the job".to_owned(),
                failed: rank,
                reason,
            }));
        }
    }
    Ok(())
}

fn failed(error: CommError) -> CliError {
    CliError::Executor(ExecutorError::Comm(error))
}
