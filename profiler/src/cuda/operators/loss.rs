//! The loss.

use catalog::profile::Measured;
use cuda_device::{Device, Losses};

use super::operator::Operator;
use crate::ProfilerError;
use crate::cuda::operands::{Tiled, Wanted, check, rounding};
use crate::cuda::timing::timed;
use crate::lanes::Effort;

pub(super) fn measure(
    operator: &Operator,
    device: &Device,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let (rows, columns) = (operator.rows as usize, operator.columns as usize);
    // Labels spread over the vocabulary.
    let label = |row: usize| row * 7919 % columns;
    let labels: Vec<u32> = (0..rows).map(|row| label(row) as u32).collect();
    let labels = device.indices(&labels)?;
    let sets: Vec<[Tiled; 1]> = operator.operands(device)?;
    let losses = Losses {
        labels: &labels,
        first: 0,
        scale: 1.0,
    };
    let [kernels, _] = operator.kernels();
    let [x] = &sets[0];
    let sum = |row: usize| x.row(row).iter().map(|x| x.exp()).sum::<f64>();
    let out = device
        .memory
        .poisoned(|| device.loss(&x.tensor, &losses, None))?;
    check(device, &kernels[0], &out, |row| Wanted {
        value: sum(row).ln() - x.of(row, label(row)),
        tolerance: 1e-4,
    })?;
    // The gradient overwrote the logits.
    check(device, &kernels[0], &x.tensor, |at| {
        let (row, c) = (at / columns, at % columns);
        let own = if c == label(row) { 1.0 } else { 0.0 };
        let value = x.at(at).exp() / sum(row) - own;
        let tolerance = (rounding(operator.dtype) + 1e-4) * value.abs();
        Wanted { value, tolerance }
    })?;
    timed(device, effort, &kernels, |call| {
        let [x] = &sets[call % sets.len()];
        device.loss(&x.tensor, &losses, None).map(drop)
    })
}
