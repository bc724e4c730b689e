//! Finds out which CUDA devices this machine has, and whether they can train.

#![allow(unsafe_code, reason = "functions of the driver")]

use std::ffi::{CStr, c_int};

use super::error::CudaError;
use super::library::Name;
use super::sys::call;
use super::sys::driver::{CUdevice, CUdevice_attribute};

/// A device as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Compute capability: major and minor, as in sm_90.
    pub capability: [u32; 2],
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
}

/// The devices that the driver reports.
///
/// # Errors
/// When there is no driver, it does not start, or it shows none.
pub fn devices() -> Result<Vec<DeviceFacts>, CudaError> {
    // SAFETY: called before any other function, with the only flag there is.
    unsafe { call!(driver::cuInit(0)) }?;
    let mut count = 0;
    // SAFETY: writes one number.
    unsafe { call!(driver::cuDeviceGetCount(&raw mut count)) }?;
    if count == 0 {
        return Err(CudaError::NoDevice);
    }
    (0..count).map(facts).collect()
}

/// Checks what training on cuda needs: a device, NVRTC and cuBLASLt. Returns the devices.
///
/// # Errors
/// The first of these that is missing.
pub fn ready() -> Result<Vec<DeviceFacts>, CudaError> {
    let devices = devices()?;
    Name::Nvrtc.open()?;
    Name::CublasLt.open()?;
    Ok(devices)
}

/// An attribute of a device.
pub(super) fn attribute(device: CUdevice, which: CUdevice_attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: writes one number.
    unsafe { call!(driver::cuDeviceGetAttribute(&raw mut value, which, device)) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// A device's compute capability.
pub(super) fn capability(device: CUdevice) -> Result<[u32; 2], CudaError> {
    Ok([
        attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        )?,
        attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )?,
    ])
}

fn facts(ordinal: c_int) -> Result<DeviceFacts, CudaError> {
    let mut device = 0;
    // SAFETY: writes one number.
    unsafe { call!(driver::cuDeviceGet(&raw mut device, ordinal)) }?;
    let mut name = [0; 256];
    // SAFETY: writes at most so many characters, ended by 0.
    unsafe {
        call!(driver::cuDeviceGetName(
            name.as_mut_ptr(),
            name.len() as c_int,
            device
        ))
    }?;
    let mut bytes = 0;
    // SAFETY: writes one number.
    unsafe { call!(driver::cuDeviceTotalMem_v2(&raw mut bytes, device)) }?;
    Ok(DeviceFacts {
        // SAFETY: the driver ended it by 0.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned(),
        capability: capability(device)?,
        multiprocessors: attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?,
        memory_bytes: bytes as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::LIBRARIES;

    #[test]
    fn what_is_missing_is_said_with_files_and_remedy() {
        for library in LIBRARIES {
            let Err(error) = library.open() else {
                continue;
            };
            let text = error.to_string();
            assert_eq!(text.lines().count(), 1, "{text}");
            for part in [library.files()[0], library.remedy()] {
                assert!(text.contains(part), "{text}");
            }
        }
        // Without a driver nothing is ready, and the driver is reported first.
        if let Err(error) = Name::Driver.open() {
            assert_eq!(ready(), Err(error));
        }
    }
}
