//! Measures a rank's work outside blocks: the optimizer, copies within the device, and the cost of queueing a kernel.

use std::time::Instant;

use catalog::DType;
use catalog::profile::{Kernel, Measured};
use cuda_device::{Device, Optimizer, Tensor, Weights};

use super::operands::{Tiled, Wanted, check, rounding};
use super::timing::repeat;
use crate::ProfilerError;
use crate::lanes::Effort;
use crate::primitives::STEP;

/// Kernels queued in a row to find the cost of queueing one.
const QUEUED: u64 = 1000;
/// Elements of a kernel whose only cost is its launch.
const TINY: usize = 32;

/// The kernels that [`measure`] adds.
pub(super) fn kernels(elements: u64) -> [Kernel; 3] {
    ["gradient norm", "adamw", "copy"].map(|name| Kernel::new(name, [elements]))
}

/// The kernels that [`launches`] adds.
pub(super) fn launch_kernels() -> [Kernel; 2] {
    ["dispatch", "launch"].map(|name| Kernel::new(name, [1]))
}

/// Measures the optimizer, the gradient norm and copies over this many elements.
///
/// # Errors
/// When memory or the device fails, or a state differs from the host's.
pub(super) fn measure(
    device: &Device,
    elements: u64,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let shape = || vec![elements as usize];
    let zeros = || device.zeros(shape(), DType::F32);
    let [master, momentum, variance] = [zeros()?, zeros()?, zeros()?];
    let gradient = Tiled::new(device, shape(), DType::F32, 1)?;
    let rounded = device
        .memory
        .poisoned(|| device.tensor(shape(), DType::Bf16))?;
    let kernels = kernels(elements);
    let gradients = std::slice::from_ref(&gradient.tensor);
    let optimizer = device.memory.poisoned(|| Optimizer::new(device))?;
    optimizer.set_numbers(&STEP)?;
    let weights = [Weights {
        states: [&master, &momentum, &variance, &gradient.tensor].map(Tensor::clone),
        rounded: Some(rounded.clone()),
        decays: true,
    }];
    optimizer.measure_and_clip(gradients, &[], None)?;
    norm(&optimizer, &gradient, &kernels[0])?;
    optimizer.step(&weights)?;
    for got in [&master, &rounded] {
        check(device, &kernels[1], got, |at| {
            stepped(gradient.at(at), got.dtype)
        })?;
    }
    repeat(effort, || {
        device.launcher.mark()?;
        optimizer.measure_and_clip(gradients, &[], None)?;
        device.launcher.mark()?;
        optimizer.step(&weights)?;
        device.launcher.mark()?;
        let (to, from) = (momentum.address(), variance.address());
        device.launcher.copy(to, from, variance.bytes())?;
        device.launcher.mark()?;
        let laps = kernels.iter().zip(device.launcher.laps()?);
        Ok(laps
            .map(|(kernel, lap)| (kernel.clone(), (lap, 1)))
            .collect())
    })
}

/// A weight of 0 after the first step: it moves by the learning rate, whatever the gradient's magnitude.
fn stepped(gradient: f64, dtype: DType) -> Wanted {
    let [first, second] = [0, 1].map(|i| {
        let moved = 1.0 - f64::from(STEP.betas[i]);
        moved / f64::from(STEP.corrections[i])
    });
    let denominator = (second.sqrt() * gradient.abs()) + f64::from(STEP.epsilon);
    let value = -f64::from(STEP.rate) * first * gradient / denominator;
    Wanted {
        value,
        tolerance: (rounding(dtype) + 1e-5) * value.abs() + 1e-12,
    }
}

/// Compares the sum of squares with the host's.
fn norm(optimizer: &Optimizer, gradient: &Tiled, kernel: &Kernel) -> Result<(), ProfilerError> {
    let got = optimizer.squares()?;
    let want = gradient.squares();
    if (got - want).abs() <= 1e-6 * want {
        return Ok(());
    }
    Err(ProfilerError::Wrong {
        kernel: format!("{} {:?}", kernel.name, kernel.sizes),
        element: 0,
        got,
        want,
    })
}

/// Measures the cost of queueing a kernel on the host, and of starting one on the device.
///
/// # Errors
/// When memory or the device fails.
pub(super) fn launches(device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
    let x = device.zeros(vec![TINY], DType::F32)?;
    repeat(effort, || {
        device.launcher.mark()?;
        let start = Instant::now();
        for _ in 0..QUEUED {
            device.add(&x, &x)?;
        }
        let host = start.elapsed().as_secs_f64();
        device.launcher.mark()?;
        let there: f64 = device.launcher.laps()?.iter().sum();
        let laps = launch_kernels().into_iter().zip([host, there]);
        Ok(laps.map(|(kernel, lap)| (kernel, (lap, QUEUED))).collect())
    })
}
