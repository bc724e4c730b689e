//! Watches: the first number that is not finite.

use super::machine::{CpuError, Watch};
use super::run::Seen;

/// Stops a rank at the first operator that makes a number that is not finite.
#[derive(Clone, Copy, Debug)]
pub struct FirstNonFinite;

impl Watch for FirstNonFinite {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), CpuError> {
        for (info, tensor) in seen.tensors(&seen.op.outputs) {
            let values = tensor.f32();
            let Some(element) = values.iter().position(|x| !x.is_finite()) else {
                continue;
            };
            return Err(CpuError::NotFinite {
                rank: seen.rank(),
                operator: seen.title(),
                pass: seen.pass(),
                tensor: info.name.clone(),
                placement: info.placements.to_string(),
                element,
                value: values[element],
            });
        }
        Ok(())
    }
}
