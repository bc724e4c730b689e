//! Norms.

use catalog::DType;
use catalog::model::NormKind;
use catalog::profile::{Kernel, Measured};
use cuda_device::{CudaError, Device, NormGradient, Tensor};

use super::operator::{ARITHMETIC, Operator, OperatorKind};
use crate::ProfilerError;
use crate::cuda::operands::{Tiled, Wanted, check};
use crate::cuda::timing::timed;
use crate::lanes::Effort;

/// Epsilon added to the variance.
const EPSILON: f64 = 1e-5;

/// A norm with its parameters, their gradients, and the operands of every set.
struct Norm<'n> {
    operator: &'n Operator,
    kind: NormKind,
    weight: Tiled,
    bias: Option<Tiled>,
    d_weight: Tiled,
    d_bias: Option<Tiled>,
    /// Input, gradient of the output, and the statistics that forward leaves.
    sets: Vec<([Tiled; 2], Tensor)>,
}

pub(super) fn measure(
    operator: &Operator,
    device: &Device,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let norm = Norm::new(operator, device)?;
    let [forward, backward] = operator.kernels();
    norm.check(device, &forward[0], &backward[0])?;
    let mut measured = timed(device, effort, &forward, |call| {
        let ([x, _], _) = &norm.sets[call % norm.sets.len()];
        norm.forward(device, x).map(drop)
    })?;
    measured.extend(timed(device, effort, &backward, |call| {
        let call = norm.gradient(call % norm.sets.len());
        device.norm_backward(&call, true).map(drop)
    })?);
    Ok(measured)
}

impl<'n> Norm<'n> {
    fn new(operator: &'n Operator, device: &Device) -> Result<Self, CudaError> {
        let kind = match operator.kind {
            OperatorKind::LayerNorm => NormKind::LayerNorm,
            _ => NormKind::RmsNorm,
        };
        let line = |dtype: DType, seed: u64| {
            Tiled::new(device, vec![operator.columns as usize], dtype, 100 + seed)
        };
        let biased = |dtype: DType, seed: u64| match kind {
            NormKind::LayerNorm => line(dtype, seed).map(Some),
            NormKind::RmsNorm => Ok(None),
        };
        let mut norm = Self {
            operator,
            kind,
            weight: line(operator.dtype, 0)?,
            bias: biased(operator.dtype, 1)?,
            d_weight: line(DType::F32, 2)?,
            d_bias: biased(DType::F32, 3)?,
            sets: Vec::new(),
        };
        for set in operator.operands(device)? {
            let (_, statistics) = norm.forward(device, &set[0])?;
            norm.sets.push((set, statistics));
        }
        Ok(norm)
    }

    fn forward(&self, device: &Device, x: &Tiled) -> Result<(Tensor, Tensor), CudaError> {
        let bias = self.bias.as_ref().map(|bias| &bias.tensor);
        let norm = (self.kind, EPSILON, false);
        device.norm(norm, &x.tensor, &self.weight.tensor, bias)
    }

    fn gradient(&self, set: usize) -> NormGradient<'_> {
        let ([x, dy], statistics) = &self.sets[set];
        NormGradient {
            kind: self.kind,
            from_one: false,
            dy: &dy.tensor,
            x: &x.tensor,
            weight: &self.weight.tensor,
            statistics,
            d_weight: &self.d_weight.tensor,
            d_bias: self.d_bias.as_ref().map(|bias| &bias.tensor),
        }
    }

    fn check(
        &self,
        device: &Device,
        forward: &Kernel,
        backward: &Kernel,
    ) -> Result<(), ProfilerError> {
        let ([x, dy], statistics) = &self.sets[0];
        let (y, again) = device.memory.poisoned(|| self.forward(device, x))?;
        let columns = x.tensor.columns();
        let each = statistics.columns();
        check(device, forward, &again, |at| {
            let (mean, inverse) = self.statistics(&x.row(at / each));
            let value = if each == 2 && at % 2 == 0 {
                mean
            } else {
                inverse
            };
            let tolerance = ARITHMETIC * inverse;
            Wanted { value, tolerance }
        })?;
        check(device, forward, &y, |at| {
            let (row, c) = (at / columns, at % columns);
            let (mean, inverse) = self.statistics(&x.row(row));
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias.at(c));
            let normed = (x.of(row, c) - mean) * inverse;
            self.operator.near(normed * self.weight.at(c) + bias, 1.0)
        })?;
        let back = || device.norm_backward(&self.gradient(0), true);
        if let Some(dx) = device.memory.poisoned(back)? {
            check(device, backward, &dx, |at| {
                self.dx(at / columns, at % columns)
            })?;
        }
        // Column sums are checked against the device's statistics, which were checked before.
        let known = device.download(statistics)?.into_f32();
        let rows = x.tensor.rows();
        check(device, backward, &self.d_weight.tensor, |c| {
            let hat = |row: usize| {
                let of = &known[row * each..][..each];
                let mean = if each == 2 { f64::from(of[0]) } else { 0.0 };
                (x.of(row, c) - mean) * f64::from(of[each - 1])
            };
            summed(
                self.d_weight.at(c),
                (0..rows).map(|row| dy.of(row, c) * hat(row)),
            )
        })?;
        match &self.d_bias {
            Some(bias) => check(device, backward, &bias.tensor, |c| {
                summed(bias.at(c), (0..rows).map(|row| dy.of(row, c)))
            }),
            None => Ok(()),
        }
    }

    /// Mean of a row, where the norm subtracts it, and the reciprocal root of its mean square.
    fn statistics(&self, row: &[f64]) -> (f64, f64) {
        let n = row.len() as f64;
        let mean = match self.kind {
            NormKind::LayerNorm => row.iter().sum::<f64>() / n,
            NormKind::RmsNorm => 0.0,
        };
        let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        (mean, 1.0 / (square + EPSILON).sqrt())
    }

    fn dx(&self, row: usize, c: usize) -> Wanted {
        let ([x, dy], _) = &self.sets[0];
        let xs = x.row(row);
        let (mean, inverse) = self.statistics(&xs);
        let n = xs.len() as f64;
        let hat = |c: usize| (xs[c] - mean) * inverse;
        let g = |c: usize| dy.of(row, c) * self.weight.at(c);
        let along = (0..xs.len()).map(|c| g(c) * hat(c)).sum::<f64>() / n;
        let average = match self.kind {
            NormKind::LayerNorm => (0..xs.len()).map(g).sum::<f64>() / n,
            NormKind::RmsNorm => 0.0,
        };
        let value = inverse * (g(c) - average - hat(c) * along);
        self.operator.near(value, inverse)
    }
}

/// A 32-bit sum, added to the value that was there before.
fn summed(before: f64, terms: impl Iterator<Item = f64>) -> Wanted {
    let (mut value, mut sizes) = (before, before.abs());
    for term in terms {
        value += term;
        sizes += term.abs();
    }
    Wanted {
        value,
        tolerance: ARITHMETIC * sizes,
    }
}
