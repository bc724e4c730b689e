//! Trains with ranks as threads of this process or as processes, on the chosen device.

use std::time::Duration;

use cuda_device::launcher::Compute;
use executor::device::{Cores, Gpus, Messages};
use executor::{Outcome, Session};

use super::{mpi, processes};
use crate::args::{CommunicatorArg, DeviceArg, GpuMessagesArg, RunArgs};
use crate::commands::device::own_gpu;
use crate::error::CliError;

/// The GPUs of a run: one for this process by its index on the host, or one for each thread.
fn gpus(args: &RunArgs, place: Option<usize>) -> Gpus {
    Gpus {
        ordinal: place.map(own_gpu),
        messages: match args.gpu_messages {
            GpuMessagesArg::Nccl => Messages::Nccl,
            GpuMessagesArg::Host => Messages::Host,
        },
        timeout: Duration::from_secs(args.timeout),
        attention: args.attention.into(),
        compute: if args.tf32 {
            Compute::Tf32
        } else {
            Compute::Whole
        },
    }
}

/// Trains with all ranks as threads of this process.
pub(super) fn threads(args: &RunArgs, session: &Session<'_>) -> Result<Outcome, CliError> {
    Ok(match args.device {
        DeviceArg::Cpu => executor::train(session)?,
        DeviceArg::Cuda => executor::train_on(&gpus(args, None), session)?,
    })
}

/// Trains; rank 0 returns the outcome of training.
pub(super) fn train(args: &RunArgs, session: &Session<'_>) -> Result<Option<Outcome>, CliError> {
    let communicator = match args.gpus {
        Some(_) => CommunicatorArg::Tcp,
        None => args.communicator,
    };
    match (communicator, args.device) {
        (CommunicatorArg::Local, _) => threads(args, session).map(Some),
        (CommunicatorArg::Mpi, DeviceArg::Cpu) => mpi::train(session, |on| Cores::among(on.ranks)),
        (CommunicatorArg::Mpi, DeviceArg::Cuda) => {
            mpi::train(session, |on| gpus(args, Some(on.rank)))
        }
        (CommunicatorArg::Tcp, DeviceArg::Cpu) => {
            processes::train(session, |place| Cores::among(place.world))
        }
        (CommunicatorArg::Tcp, DeviceArg::Cuda) => {
            processes::train(session, |place| gpus(args, Some(place.local_rank)))
        }
    }
}
