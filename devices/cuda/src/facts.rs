//! The condition a GPU is in, by NVML: what a measurement should be read with.

#![allow(unsafe_code, reason = "functions of NVML")]

use std::ffi::{CStr, c_uint};

use super::error::CudaError;
use super::sys::nvml::{self, Nvml};

/// A GPU's clocks, power and heat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Version of the driver.
    pub driver: String,
    /// Clock of the multiprocessors now and at most, in MHz.
    pub clock_mhz: [u32; 2],
    /// Clock of the memory now, in MHz.
    pub memory_clock_mhz: u32,
    /// Power now and at most, in W.
    pub power_watts: [u32; 2],
    /// Degrees Celsius.
    pub celsius: u32,
}

/// The condition of a GPU now.
///
/// # Errors
/// When NVML is missing or does not know the device.
pub fn condition(ordinal: u32) -> Result<Condition, CudaError> {
    let nvml = Nvml::load()?;
    // SAFETY: called before any other function.
    unsafe { nvml.init() }?;
    let read = read(&nvml, ordinal);
    // SAFETY: initialised above.
    unsafe { nvml.shutdown() }?;
    read
}

fn read(nvml: &Nvml, ordinal: u32) -> Result<Condition, CudaError> {
    let mut device = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { nvml.device(ordinal, &raw mut device) }?;
    let number = |ask: &dyn Fn(*mut c_uint) -> Result<(), CudaError>| {
        let mut value = 0;
        ask(&raw mut value).map(|()| value)
    };
    let mut version = [0; 96];
    // SAFETY: writes at most so many characters, ended by 0.
    unsafe { nvml.driver_version(version.as_mut_ptr(), version.len() as c_uint) }?;
    // SAFETY: each of these writes one number.
    unsafe {
        Ok(Condition {
            driver: CStr::from_ptr(version.as_ptr())
                .to_string_lossy()
                .into_owned(),
            clock_mhz: [
                number(&|out| nvml.clock(device, nvml::CLOCK_SM, out))?,
                number(&|out| nvml.most_clock(device, nvml::CLOCK_SM, out))?,
            ],
            memory_clock_mhz: number(&|out| nvml.clock(device, nvml::CLOCK_MEMORY, out))?,
            power_watts: [
                number(&|out| nvml.power(device, out))? / 1000,
                number(&|out| nvml.power_limit(device, out))? / 1000,
            ],
            celsius: number(&|out| nvml.temperature(device, 0, out))?,
        })
    }
}
