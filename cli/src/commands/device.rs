//! The device that a run works on.

use executor::device::{Cores, Gpus};
use executor::{Outcome, Session};

use super::run::{mpi, processes};
use crate::args::{CommunicatorArg, DeviceArg, NumericsArg, RunArgs};
use crate::error::CliError;
use crate::inputs::EXECUTOR;

/// Whether the device is here and can do what is asked, before anything else is done: what is missing is
/// said in one line.
pub(crate) fn check(args: &RunArgs) -> Result<(), CliError> {
    if args.device == DeviceArg::Cpu {
        return Ok(());
    }
    let wrong = |message: &str| Err(CliError::Usage(message.to_owned()));
    if args.numerics == NumericsArg::Exact {
        return wrong("--numerics exact is the cpu device's: use --device cpu, or --numerics fast");
    }
    if args.communicator == CommunicatorArg::Mpi {
        return wrong(
            "--communicator mpi is the cpu device's; ranks that mpirun started meet by --communicator tcp too",
        );
    }
    dtensor::cuda::ready()?;
    Ok(())
}

/// The runtime that predicts a device's runs.
pub(crate) fn runtime(device: DeviceArg) -> &'static str {
    match device {
        DeviceArg::Cpu => EXECUTOR,
        DeviceArg::Cuda => "vescale-cuda",
    }
}

/// Trains with all ranks as threads of this process.
pub(crate) fn train_threads(device: DeviceArg, session: &Session<'_>) -> Result<Outcome, CliError> {
    Ok(match device {
        DeviceArg::Cpu => executor::train(session)?,
        DeviceArg::Cuda => executor::train_on(&Gpus { ordinal: None }, session)?,
    })
}

/// Trains; rank 0 returns what training left.
pub(crate) fn train(args: &RunArgs, session: &Session<'_>) -> Result<Option<Outcome>, CliError> {
    match (args.communicator, args.device) {
        (CommunicatorArg::Local, device) => train_threads(device, session).map(Some),
        (CommunicatorArg::Mpi, _) => mpi::train(session),
        (CommunicatorArg::Tcp, DeviceArg::Cpu) => {
            processes::train(session, |place| Cores::among(place.world))
        }
        (CommunicatorArg::Tcp, DeviceArg::Cuda) => processes::train(session, |place| Gpus {
            ordinal: Some(place.local_rank as u32),
        }),
    }
}
