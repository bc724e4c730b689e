//! The device that a run works on.

use std::time::Duration;

use dtensor::cuda::launcher::{AttentionBy, Compute};
use executor::device::{Cores, Gpus, Messages};
use executor::{Outcome, Session};
use spec::Runtime;
use spec::runtime::AttentionKernel;

use super::run::{mpi, processes};
use crate::args::{AttentionArg, CommunicatorArg, DeviceArg, GpuMessagesArg, NumericsArg, RunArgs};
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
        let others = [
            ("--tf32", args.tf32),
            ("--attention own", args.attention == AttentionArg::Own),
            (
                "--gpu-messages host",
                args.gpu_messages == GpuMessagesArg::Host,
            ),
        ];
        return match others.iter().find(|(_, asked)| *asked) {
            Some((flag, _)) => wrong(format!("{flag}: expected --device cuda with it")),
            None => Ok(()),
        };
    }
    if args.numerics == NumericsArg::Exact {
        return wrong("--numerics exact: is the cpu device's, use --device cpu".to_owned());
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

/// The runtime that predicts a run on its device.
pub(crate) fn runtime(args: &RunArgs) -> Result<Runtime, CliError> {
    if args.device == DeviceArg::Cpu {
        return Ok(spec::load::runtime(EXECUTOR)?);
    }
    let runtime = spec::load::runtime("vescale-cuda")?;
    Ok(match args.attention {
        AttentionArg::Library => runtime,
        AttentionArg::Own => Runtime {
            attention: AttentionKernel::Flash2TwoPass,
            ..runtime
        },
    })
}

/// The GPUs of a run: that of a process's place on its host, or one for every thread.
fn gpus(args: &RunArgs, place: Option<usize>) -> Gpus {
    // A launcher may show each process its own GPU only.
    let only = dtensor::cuda::ready().is_ok_and(|here| here.len() == 1);
    Gpus {
        ordinal: place.map(|place| if only { 0 } else { place as u32 }),
        messages: match args.gpu_messages {
            GpuMessagesArg::Nccl => Messages::Nccl,
            GpuMessagesArg::Host => Messages::Host,
        },
        timeout: Duration::from_secs(args.timeout),
        attention: match args.attention {
            AttentionArg::Library => AttentionBy::Library,
            AttentionArg::Own => AttentionBy::Own,
        },
        compute: if args.tf32 {
            Compute::Tf32
        } else {
            Compute::Whole
        },
    }
}

/// Trains with all ranks as threads of this process.
pub(crate) fn train_threads(args: &RunArgs, session: &Session<'_>) -> Result<Outcome, CliError> {
    Ok(match args.device {
        DeviceArg::Cpu => executor::train(session)?,
        DeviceArg::Cuda => executor::train_on(&gpus(args, None), session)?,
    })
}

/// Trains; rank 0 returns what training left.
pub(crate) fn train(args: &RunArgs, session: &Session<'_>) -> Result<Option<Outcome>, CliError> {
    let communicator = match args.gpus {
        Some(_) => CommunicatorArg::Tcp,
        None => args.communicator,
    };
    match (communicator, args.device) {
        (CommunicatorArg::Local, _) => train_threads(args, session).map(Some),
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
