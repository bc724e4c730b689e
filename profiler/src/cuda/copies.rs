//! Copies between the host and the device.

use std::time::Instant;

use catalog::DType;
use catalog::profile::{Kernel, Measured};
use cuda_device::{CudaError, Device};

use super::timing::repeat;
use crate::ProfilerError;
use crate::lanes::{Effort, Laps};

/// The kernels measured: one for each direction.
pub(super) fn kernels(bytes: u64) -> [Kernel; 2] {
    ["copy to device", "copy to host"].map(|name| Kernel::new(name, [bytes]))
}

/// Measures copies of this many bytes in both directions, by the host's clock. Host memory is pageable, so the driver
/// stages copies through its own. Checks that the bytes come back unchanged.
///
/// # Errors
/// When memory or the device fails, or the bytes that come back differ.
pub(super) fn measure(
    device: &Device,
    bytes: u64,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let there = device
        .memory
        .poisoned(|| device.tensor(vec![bytes as usize], DType::U8))?;
    let from: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    let mut back = vec![0; from.len()];
    let [to_device, to_host] = kernels(bytes);
    let launcher = &device.launcher;
    let clock = |work: &mut dyn FnMut() -> Result<(), CudaError>| -> Result<f64, CudaError> {
        let start = Instant::now();
        work()?;
        launcher.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let measured = repeat(effort, || {
        let sent = clock(&mut || launcher.write(there.address(), &from))?;
        let read = clock(&mut || launcher.read(there.address(), &mut back))?;
        Ok(Laps::from([
            (to_device.clone(), (sent, 1)),
            (to_host.clone(), (read, 1)),
        ]))
    })?;
    match from.iter().zip(&back).position(|(a, b)| a != b) {
        Some(element) => Err(ProfilerError::Wrong {
            kernel: format!("copy of {bytes} bytes"),
            element,
            got: f64::from(back[element]),
            want: f64::from(from[element]),
        }),
        None => Ok(measured),
    }
}
