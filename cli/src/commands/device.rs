//! The device that a command works on.

use crate::args::DeviceArg;
use crate::error::CliError;

/// Whether the device is here, before anything else is done: what is missing is said in one line.
pub(crate) fn check(device: DeviceArg) -> Result<(), CliError> {
    match device {
        DeviceArg::Cpu => Ok(()),
        DeviceArg::Cuda => {
            let devices = dtensor::cuda::ready()?;
            let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
            Err(CliError::Usage(format!(
                "CUDA works here ({}), but this version trains on --device cpu only; `profile --device cuda` measures it",
                names.join(", ")
            )))
        }
    }
}
