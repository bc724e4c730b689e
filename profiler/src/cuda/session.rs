//! Measures what a profile lacks, one request after the other, within a budget of time.

use std::collections::BTreeSet;

use catalog::profile::{Kernel, Machine, Measured, Profile};
use cuda_device::CudaError;

use super::Budget;
use crate::ProfilerError;
use crate::lanes::Effort;

/// Something to measure.
pub trait Asked {
    /// The kernels that measuring it adds to a profile.
    fn kernels(&self) -> Vec<Kernel>;
    /// How many times it is timed, each time within the effort's box.
    fn parts(&self) -> usize;
    /// On one line, for people.
    fn described(&self) -> String;
}

/// What measures.
pub trait Meter {
    /// What it is asked for.
    type Asked: Asked;
    /// Measures.
    ///
    /// # Errors
    /// When memory or the device fails, or a result is wrong.
    fn measure(
        &mut self,
        asked: &Self::Asked,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError>;
    /// What is measured on, as it is known by now.
    fn machine(&self) -> Machine;
}

/// Adds to a profile what it lacks of `requests`; what it holds is neither measured again nor replaced. `after`
/// hears after every measurement how large a share of all is done. Returns what did not fit the device's memory.
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

/// The machine as it is known now; as many GPUs and hosts were measured together as at most before.
fn joined(before: &Machine, now: Machine) -> Machine {
    let most = |of: fn(&catalog::profile::Gpu) -> Option<u64>| {
        let of = |machine: &Machine| machine.gpu.as_ref().and_then(of);
        of(before).max(of(&now))
    };
    let count = most(|gpu| Some(gpu.count)).unwrap_or(1);
    let hosts = most(|gpu| gpu.hosts);
    // What was measured now may have had no attention in it.
    let known = before.gpu.as_ref().and_then(|gpu| gpu.attention.clone());
    let gpu = now.gpu.map(|gpu| catalog::profile::Gpu {
        count,
        hosts,
        attention: gpu.attention.or(known),
        ..gpu
    });
    Machine { gpu, ..now }
}
