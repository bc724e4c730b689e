//! Measures what a profile lacks, one request after another, within a time budget.

use std::collections::BTreeSet;

use catalog::profile::{Kernel, Machine, Measured, Profile};
use cuda_device::CudaError;

use super::Budget;
use crate::ProfilerError;
use crate::lanes::Effort;

/// A request for a measurement.
pub trait Asked {
    /// The kernels that it adds to a profile.
    fn kernels(&self) -> Vec<Kernel>;
    /// How many separately timed parts it has, each within the time of one [`Effort`].
    fn parts(&self) -> usize;
    /// The request on one line, for people.
    fn described(&self) -> String;
}

/// Runs requests.
pub trait Meter {
    /// Type of its requests.
    type Asked: Asked;
    /// Runs a request.
    ///
    /// # Errors
    /// When memory or the device fails, or a result is wrong.
    fn measure(
        &mut self,
        asked: &Self::Asked,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError>;
    /// The machine that is measured, as far as it is known by now.
    fn machine(&self) -> Machine;
}

/// Adds to a profile those of `requests` that it lacks; existing measurements are neither repeated nor replaced. Calls
/// `after` after every measurement with the share that is done. Returns the requests that did not fit in device memory.
///
/// # Errors
/// When a measurement fails for another reason, or `after` does.
pub fn complete<M: Meter, E: From<ProfilerError>>(
    meter: &mut M,
    profile: &mut Profile,
    requests: &[M::Asked],
    (budget, effort): (Budget, Effort),
    mut after: impl FnMut(f64, &Profile) -> Result<(), E>,
) -> Result<Vec<String>, E> {
    let key = |kernel: Kernel| (kernel.name, kernel.sizes);
    let held = profile.measured.iter();
    let mut held: BTreeSet<(String, Vec<u64>)> =
        held.map(|m| (m.kernel.clone(), m.sizes.clone())).collect();
    let lacks = |held: &BTreeSet<_>, request: &M::Asked| {
        let mut kernels = request.kernels().into_iter();
        kernels.any(|kernel| !held.contains(&key(kernel)))
    };
    let whole: usize = requests.iter().map(Asked::parts).sum();
    let mut left = whole;
    let mut too_large = Vec::new();
    for request in requests {
        if lacks(&held, request) {
            match meter.measure(request, budget.share(effort, left)) {
                Ok(measured) => {
                    let new = |m: &Measured| held.insert((m.kernel.clone(), m.sizes.clone()));
                    profile.add(measured.into_iter().filter(new));
                    profile.machine = joined(&profile.machine, meter.machine());
                }
                Err(ProfilerError::Cuda(CudaError::OutOfMemory { .. })) => {
                    too_large.push(request.described());
                }
                Err(error) => return Err(error.into()),
            }
        }
        left -= request.parts();
        after((whole - left) as f64 / whole as f64, profile)?;
    }
    Ok(too_large)
}

/// The machine as it is known now, with the larger numbers of GPUs and hosts of both.
fn joined(before: &Machine, now: Machine) -> Machine {
    let most = |of: fn(&catalog::profile::Gpu) -> Option<u64>| {
        let of = |machine: &Machine| machine.gpu.as_ref().and_then(of);
        of(before).max(of(&now))
    };
    let count = most(|gpu| Some(gpu.count)).unwrap_or(1);
    let hosts = most(|gpu| gpu.hosts);
    // This session may not have measured attention, so its library is kept from before.
    let known = before.gpu.as_ref().and_then(|gpu| gpu.attention.clone());
    let gpu = now.gpu.map(|gpu| catalog::profile::Gpu {
        count,
        hosts,
        attention: gpu.attention.or(known),
        ..gpu
    });
    Machine { gpu, ..now }
}
