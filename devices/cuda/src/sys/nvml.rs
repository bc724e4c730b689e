//! NVML: facts of devices that the driver's other interface does not tell.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::library::Name;
use crate::loading::functions;

/// A device.
pub type Device = *mut c_void;

/// `NVML_CLOCK_SM`.
pub const CLOCK_SM: c_int = 1;
/// `NVML_CLOCK_MEM`.
pub const CLOCK_MEMORY: c_int = 2;

functions! {
    /// Functions of NVML.
    Nvml of Name::Nvml;
    fn init = "nvmlInit_v2"();
    fn shutdown = "nvmlShutdown"();
    fn driver_version = "nvmlSystemGetDriverVersion"(version: *mut c_char, len: c_uint);
    fn device = "nvmlDeviceGetHandleByIndex_v2"(index: c_uint, device: *mut Device);
    fn name = "nvmlDeviceGetName"(device: Device, name: *mut c_char, len: c_uint);
    fn clock = "nvmlDeviceGetClockInfo"(device: Device, which: c_int, megahertz: *mut c_uint);
    fn most_clock = "nvmlDeviceGetMaxClockInfo"(device: Device, which: c_int, megahertz: *mut c_uint);
    fn power = "nvmlDeviceGetPowerUsage"(device: Device, milliwatts: *mut c_uint);
    fn power_limit = "nvmlDeviceGetEnforcedPowerLimit"(device: Device, milliwatts: *mut c_uint);
    fn temperature = "nvmlDeviceGetTemperature"(device: Device, sensor: c_int, celsius: *mut c_uint);
}

impl Nvml {
    /// `nvmlReturn_t` of the header.
    #[allow(clippy::unused_self, reason = "every table says its reasons")]
    fn reason(&self, code: i32) -> String {
        match code {
            1 => "not initialised",
            2 => "invalid argument",
            3 => "not supported by this device",
            4 => "no permission",
            9 => "the driver is not loaded",
            15 => "the device is lost",
            _ => "unknown error",
        }
        .to_owned()
    }
}
