//! The condition of a GPU, read from NVML, to be recorded with measurements.

use std::ffi::OsStr;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;

use super::error::CudaError;
use super::library::Name;

/// A GPU's clocks and power draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Version of the driver.
    pub driver: String,
    /// SM clock in MHz: now, and the maximum.
    pub clock_mhz: [u32; 2],
    /// Memory clock in MHz.
    pub memory_clock_mhz: u32,
    /// Power in W: the draw now, and the limit.
    pub power_watts: [u32; 2],
}

/// Reads the current condition of the GPU with this ordinal.
///
/// # Errors
/// When NVML is missing or does not know the device.
pub fn condition(ordinal: u32) -> Result<Condition, CudaError> {
    let path = &Name::Nvml.open()?.path;
    let nvml = Nvml::builder().lib_path(OsStr::new(path)).init();
    let read = nvml.and_then(|nvml| read(&nvml, ordinal));
    read.map_err(|error| CudaError::Facts(error.to_string()))
}

fn read(nvml: &Nvml, ordinal: u32) -> Result<Condition, NvmlError> {
    let device = nvml.device_by_index(ordinal)?;
    Ok(Condition {
        driver: nvml.sys_driver_version()?,
        clock_mhz: [
            device.clock_info(Clock::SM)?,
            device.max_clock_info(Clock::SM)?,
        ],
        memory_clock_mhz: device.clock_info(Clock::Memory)?,
        power_watts: [
            device.power_usage()? / 1000,
            device.enforced_power_limit()? / 1000,
        ],
    })
}
