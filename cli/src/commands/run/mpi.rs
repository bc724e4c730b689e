//! A run whose ranks are MPI processes.

#[cfg(feature = "mpi")]
pub(crate) use carried::train;

use executor::{Outcome, Session};

use crate::error::CliError;

/// Says that MPI was not compiled in.
#[cfg(not(feature = "mpi"))]
pub(crate) fn train(_session: &Session<'_>) -> Result<Option<Outcome>, CliError> {
    Err(CliError::Usage(
        "--communicator mpi: this build has no MPI; install one with its mpicc and libclang, and build with --features mpi"
            .to_owned(),
    ))
}

#[cfg(feature = "mpi")]
mod carried {
    use dtensor::comm::mpi::MpiCommunicator;
    use executor::device::Cores;

    use super::{CliError, Outcome, Session};

    /// Ranks on this host, as launchers say.
    const ON_HOST: [&str; 4] = [
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "PMI_LOCAL_SIZE",
        "SLURM_NTASKS_PER_NODE",
    ];

    /// Trains as one rank; rank 0 returns what training left.
    pub(crate) fn train(session: &Session<'_>) -> Result<Option<Outcome>, CliError> {
        let wrong = |e| CliError::Executor(executor::ExecutorError::Comm(e));
        let comm = MpiCommunicator::join(session.job.settings.timeout).map_err(wrong)?;
        let on_host = ON_HOST
            .iter()
            .find_map(|name| std::env::var(name).ok()?.parse().ok())
            .unwrap_or_else(|| dtensor::comm::Communicator::world(&comm));
        executor::train_rank(&Cores::among(on_host), session, &comm).map_err(|error| {
            // Leaving may have to stop ranks that hang, and this one with them: say why first.
            let error = CliError::from(error);
            eprintln!("error: {error}");
            CliError::Said(error.exit_code())
        })
    }
}
