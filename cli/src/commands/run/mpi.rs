//! A run whose ranks are MPI processes.

#[cfg(feature = "mpi")]
pub(crate) use carried::train;

use executor::device::Devices;
use executor::{Outcome, Session};

use crate::error::CliError;

/// A rank's place on its host, as its launcher reports it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnHost {
    /// Number of ranks on the host.
    pub(crate) ranks: usize,
    /// Index of this rank among them.
    pub(crate) rank: usize,
}

/// The error for a build without MPI.
#[cfg(not(feature = "mpi"))]
pub(crate) fn train<D: Devices>(
    _session: &Session<'_>,
    _devices: impl Fn(OnHost) -> D,
) -> Result<Option<Outcome>, CliError> {
    let expected =
        "a build with --features mpi, made where an MPI, its mpicc and libclang are installed";
    let what = "this build has no MPI";
    Err(CliError::unexpected("--communicator mpi", what, expected))
}

#[cfg(feature = "mpi")]
mod carried {
    use comm::Communicator;
    use comm::mpi::MpiCommunicator;

    use crate::commands::run::mpi::{CliError, Devices, OnHost, Outcome, Session};

    /// Environment variables in which launchers give the number of ranks on this host.
    const RANKS: [&str; 4] = [
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "PMI_LOCAL_SIZE",
        "SLURM_NTASKS_PER_NODE",
    ];
    /// Environment variables in which launchers give this rank's index on its host.
    const RANK: [&str; 4] = [
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PMI_LOCAL_RANK",
        "SLURM_LOCALID",
    ];

    fn said(names: [&str; 4]) -> Option<usize> {
        names
            .iter()
            .find_map(|name| std::env::var(name).ok()?.parse().ok())
    }

    /// Trains as one rank; rank 0 returns the outcome of training.
    pub(crate) fn train<D: Devices>(
        session: &Session<'_>,
        devices: impl Fn(OnHost) -> D,
    ) -> Result<Option<Outcome>, CliError> {
        let wrong = |e| CliError::Executor(executor::ExecutorError::Comm(e));
        let comm = MpiCommunicator::join(session.job.settings.timeout).map_err(wrong)?;
        let on_host = OnHost {
            ranks: said(RANKS).unwrap_or_else(|| comm.world()),
            rank: said(RANK).unwrap_or_else(|| comm.rank()),
        };
        executor::train_rank(&devices(on_host), session, &comm).map_err(|error| {
            // Leaving may have to abort ranks that hang, and this one with them: report the error first.
            let error = CliError::from(error);
            crate::output::error(&error.to_string());
            CliError::Said(error.exit_code())
        })
    }
}
