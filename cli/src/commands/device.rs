//! The device that a run works on.

use executor::device::{Cores, Gpus};
use executor::{Outcome, Session};

use super::run::{mpi, processes};
use crate::args::{CommunicatorArg, DeviceArg, NumericsArg, RunArgs};
use crate::error::CliError;
use crate::inputs::EXECUTOR;

/// Whether the device is here and can do what is asked of so many ranks, before anything else is done: what
/// is missing is said in one line.
pub(crate) fn check(args: &RunArgs, ranks: u64) -> Result<(), CliError> {
    let wrong = |message: String| Err(CliError::Usage(message));
    if let Some(gpus) = args.gpus {
        if args.device == DeviceArg::Cpu {
            return wrong(format!("--gpus {gpus}: expected --device cuda with it"));
        }
        if gpus != ranks {
            return wrong(format!("--gpus {gpus}: the plan has {ranks} ranks"));
        }
    }
    if args.device == DeviceArg::Cpu {
        return Ok(());
    }
    if args.numerics == NumericsArg::Exact {
        return wrong("--numerics exact: is the cpu device's, use --device cpu".to_owned());
    }
    if args.communicator == CommunicatorArg::Mpi {
        let message =
            "--communicator mpi: is the cpu device's; ranks that mpirun starts meet by tcp too";
        return wrong(message.to_owned());
    }
    let here = dtensor::cuda::ready()?.len() as u64;
    if args.communicator == CommunicatorArg::Local && ranks > here {
        return wrong(format!(
            "the plan has {ranks} ranks, this host shows {here} GPUs; torchrun, srun or mpirun start \
             --communicator tcp on several hosts"
        ));
    }
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
    let communicator = match args.gpus {
        Some(_) => CommunicatorArg::Tcp,
        None => args.communicator,
    };
    match (communicator, args.device) {
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
