//! A run whose ranks are processes that meet over TCP: those that torchrun, srun or mpirun started, or
//! this one and others that it starts on this host.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use dtensor::comm::bootstrap::{Place, PlaceError};
use dtensor::comm::tcp::TcpCommunicator;
use executor::device::Devices;
use executor::{ExecutorError, Outcome, Session};

use crate::error::CliError;

/// Processes started here; whatever still runs when this rank is done is stopped.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Ended already, or cannot be ended: nothing is left to do either way.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Trains as one rank on the device of its place; rank 0 returns what training left.
pub(crate) fn train<D: Devices>(
    session: &Session<'_>,
    devices: impl Fn(&Place) -> D,
) -> Result<Option<Outcome>, CliError> {
    let variable = |name: &str| std::env::var(name).ok();
    let (place, others) = match Place::new(variable) {
        Ok(place) => (place, Others(Vec::new())),
        Err(PlaceError::NoLauncher) => start(session.job.strategy.world() as usize)?,
        Err(error) => return Err(CliError::Usage(error.to_string())),
    };
    let comm = TcpCommunicator::join(&place, session.job.settings.timeout)
        .map_err(|e| CliError::Executor(ExecutorError::Comm(e)))?;
    let trained = executor::train_rank(&devices(&place), session, &comm)?;
    drop(comm);
    finish(others)?;
    Ok(trained)
}

/// Starts ranks 1 and up as this very command, and says where all of them meet.
fn start(world: usize) -> Result<(Place, Others), CliError> {
    let wrong = |e: std::io::Error| CliError::Usage(format!("cannot start ranks: {e}"));
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(wrong)?
        .port();
    let place = |rank| Place {
        rank,
        world,
        local_rank: rank,
        host: "127.0.0.1".to_owned(),
        port,
    };
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

/// Waits for the others, which have nothing left to do.
fn finish(mut others: Others) -> Result<(), CliError> {
    for (rank, child) in (1..).zip(&mut others.0) {
        let ended = child.wait();
        let wrong = match ended {
            Ok(status) if status.success() => continue,
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        return Err(CliError::Usage(format!(
            "rank {rank} ended wrongly: {wrong}"
        )));
    }
    Ok(())
}
