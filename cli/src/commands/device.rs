//! The device that `run` trains on.

use std::path::Path;

use answers::inputs::EXECUTOR;
use catalog::profile::Profile;
use catalog::runtime::AttentionKernel;
use catalog::{Mistake, Runtime};
use cuda_device::launcher::AttentionBy;

use crate::args::{AttentionArg, CommunicatorArg, DeviceArg, GpuMessagesArg, NumericsArg, RunArgs};
use crate::error::CliError;
use crate::inputs;

impl From<AttentionArg> for AttentionBy {
    fn from(arg: AttentionArg) -> Self {
        match arg {
            AttentionArg::Library => Self::Library,
            AttentionArg::Own => Self::Own,
        }
    }
}

/// Refuses a profile whose attention was measured with a library if the run uses the project's own
/// attention kernels.
pub(crate) fn measured_as_run(
    asked: AttentionArg,
    profile: &Profile,
    path: &Path,
) -> Result<(), CliError> {
    let gpu = profile.machine.gpu.as_ref();
    match gpu.and_then(|gpu| gpu.attention.as_ref()) {
        Some(library) if asked == AttentionArg::Own => {
            let wrong = Mistake::new(format!(
                "{} was measured with the attention of {library}, but this run uses the project's own attention kernels",
                path.display()
            ));
            Err(wrong
                .at("--attention own")
                .expected("a profile measured with the project's own attention kernels")
                .example("vescale-plan profile --device cuda --attention own -o own-attention.yaml")
                .into())
        }
        _ => Ok(()),
    }
}

/// Message that core attention runs on the project's own kernels, and why the library that was asked for does not.
pub(crate) fn own_kernels(reason: Option<&str>) -> String {
    let reason = reason.map_or(String::new(), |reason| format!(": {reason}"));
    format!("the project's own kernels{reason}")
}

/// Checks before anything else that the device exists and can run this many ranks; what is missing is reported in one
/// line.
pub(crate) fn check(args: &RunArgs, ranks: u64) -> Result<(), CliError> {
    if args.device == DeviceArg::Cpu {
        let by_host = args.gpu_messages == GpuMessagesArg::Host;
        let others = [
            ("--tf32", args.tf32),
            ("--attention own", args.attention == AttentionArg::Own),
            ("--gpu-messages host", by_host),
        ];
        return inputs::of_cuda(args.gpus, &others);
    }
    if let Some(gpus) = args.gpus.filter(|gpus| *gpus != ranks) {
        return inputs::refuse("--gpus", gpus, &format!("{ranks}, the plan's ranks"));
    }
    if args.numerics == NumericsArg::Exact {
        let what = "only the cpu device has exact numerics";
        return Err(CliError::unexpected(
            "--numerics exact",
            what,
            "--device cpu",
        ));
    }
    let here = cuda_device::ready()?.len() as u64;
    if args.communicator == CommunicatorArg::Local && ranks > here {
        let what = format!("the plan has {ranks} ranks, this host shows {here} GPUs");
        let expected = "--communicator tcp, started by torchrun, srun or mpirun on several hosts";
        return Err(CliError::unexpected("--communicator local", what, expected));
    }
    Ok(())
}

/// The runtime that predicts a run on its device.
pub(crate) fn runtime(args: &RunArgs) -> Result<Runtime, CliError> {
    if args.device == DeviceArg::Cpu {
        return Ok(catalog::load::runtime(EXECUTOR)?);
    }
    let runtime = catalog::load::runtime("vescale-cuda")?;
    Ok(match args.attention {
        AttentionArg::Library => runtime,
        AttentionArg::Own => Runtime {
            attention: AttentionKernel::Flash2TwoPass,
            ..runtime
        },
    })
}

/// Ordinal of the GPU for the process at this index on its host. A launcher may show each process only its own GPU.
pub(crate) fn own_gpu(place: usize) -> u32 {
    let only = cuda_device::ready().is_ok_and(|here| here.len() == 1);
    if only { 0 } else { place as u32 }
}

#[cfg(test)]
mod tests {
    use catalog::profile::{Gpu, Machine, SCHEMA_VERSION};

    use super::*;

    #[test]
    fn why_no_library_runs_attention_is_said() {
        let old = "cuDNN 9.8.0 at /lib/libcudnn.so.9 is older than 9.16";
        for (reason, says) in [
            (None, String::new()),
            (
                Some("cuDNN was not found"),
                ": cuDNN was not found".to_owned(),
            ),
            (Some(old), format!(": {old}")),
        ] {
            let expected = format!("the project's own kernels{says}");
            assert_eq!(own_kernels(reason), expected);
        }
    }

    #[test]
    fn times_of_a_library_are_not_those_of_our_kernels() {
        let profile = |attention: Option<&str>| Profile {
            schema_version: SCHEMA_VERSION,
            tool_version: "test".to_owned(),
            machine: Machine {
                processor: "a GPU".to_owned(),
                cores: 1,
                memory_bytes: 1 << 30,
                gpu: Some(Gpu {
                    attention: attention.map(str::to_owned),
                    ..Gpu::default()
                }),
            },
            measured: Vec::new(),
        };
        let check = |asked, attention| {
            let path = Path::new("gpu.yaml");
            measured_as_run(asked, &profile(attention), path)
        };
        let cudnn = Some("cuDNN 9.19.0");
        assert!(check(AttentionArg::Library, cudnn).is_ok());
        assert!(check(AttentionArg::Own, None).is_ok());
        let error = check(AttentionArg::Own, cudnn).expect_err("another's times");
        for part in ["gpu.yaml", "cuDNN 9.19.0", "--attention own"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
