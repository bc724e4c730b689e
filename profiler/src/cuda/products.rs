//! Matrix products of linear layers: forward, gradient of the input, gradient of the weight.

use dtensor::cuda::{CudaError, Device};
use spec::DType;
use spec::profile::{Kernel, Measured};

use super::operands::{Tiled, Wanted, check, rounding};
use super::timing::{sets, timed};
use crate::ProfilerError;
use crate::lanes::Effort;

/// How numbers of a product are held and multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// As kernels are named.
    pub name: &'static str,
    /// Of operands and results; gradients of weights are in 32 bits.
    pub dtype: DType,
    /// Relative error that multiplying two operands adds to their product.
    pub product_error: f64,
}

/// Element types that products are measured in.
pub const ELEMENTS: [Element; 2] = [
    Element {
        name: "bf16",
        dtype: DType::Bf16,
        product_error: 0.0,
    },
    Element {
        name: "f32",
        dtype: DType::F32,
        product_error: 0.0,
    },
];

/// A linear layer's products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// Tokens.
    pub rows: u64,
    /// Features in.
    pub inputs: u64,
    /// Features out.
    pub outputs: u64,
    /// Element type.
    pub element: Element,
}

/// Operands of one set.
struct Operands {
    x: Tiled,
    w: Tiled,
    dy: Tiled,
    gradient: Tiled,
}

impl Linear {
    /// The kernels that are measured, as traces name them.
    #[must_use]
    pub fn kernels(&self) -> [Kernel; 3] {
        let (m, n, k) = (self.rows, self.outputs, self.inputs);
        let named = |pass: &str, sizes: [u64; 3]| {
            Kernel::new(format!("matmul {pass} {}", self.element.name), sizes)
        };
        [
            named("forward", [m, n, k]),
            named("backward", [m, k, n]),
            named("weight gradient", [n, k, m]),
        ]
    }

    fn operands(&self, device: &Device, seed: u64) -> Result<Operands, CudaError> {
        let [m, n, k] = [self.rows, self.outputs, self.inputs].map(|size| size as usize);
        let dtype = self.element.dtype;
        let tiled = |shape: [usize; 2], dtype, of: u64| {
            Tiled::new(device, shape.into(), dtype, 4 * seed + of)
        };
        Ok(Operands {
            x: tiled([m, k], dtype, 0)?,
            w: tiled([n, k], dtype, 1)?,
            dy: tiled([m, n], dtype, 2)?,
            gradient: tiled([n, k], DType::F32, 3)?,
        })
    }

    /// Checks and times all three.
    ///
    /// # Errors
    /// When memory or the device fails, or a product is another than the host's.
    pub fn measure(&self, device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
        let dtype = self.element.dtype;
        let bytes =
            (self.rows * (self.inputs + self.outputs) + self.inputs * self.outputs) * dtype.size();
        let sets: Vec<Operands> = (0..sets(bytes) as u64)
            .map(|set| self.operands(device, set))
            .collect::<Result<_, _>>()?;
        self.check(device, &sets[0])?;
        let [forward, backward, weight] = self.kernels();
        let set = |call: usize| &sets[call % sets.len()];
        let mut measured = timed(device, effort, &[forward], |call| {
            let Operands { x, w, .. } = set(call);
            device.linear(&x.tensor, &w.tensor, None, dtype).map(drop)
        })?;
        measured.extend(timed(device, effort, &[backward], |call| {
            let Operands { dy, w, .. } = set(call);
            device
                .linear_backward(&dy.tensor, &w.tensor, dtype)
                .map(drop)
        })?);
        measured.extend(timed(device, effort, &[weight], |call| {
            let Operands {
                dy, x, gradient, ..
            } = set(call);
            device.add_linear_gradient(&gradient.tensor, &dy.tensor, &x.tensor)
        })?);
        Ok(measured)
    }

    fn check(&self, device: &Device, set: &Operands) -> Result<(), ProfilerError> {
        let dtype = self.element.dtype;
        let Operands { x, w, dy, gradient } = set;
        let [forward, backward, weight] = self.kernels();
        let [m, n, k] = [self.rows, self.outputs, self.inputs].map(|size| size as usize);
        let y = device
            .memory
            .poisoned(|| device.linear(&x.tensor, &w.tensor, None, dtype))?;
        check(device, &forward, &y, |at| {
            let (i, j) = (at / n, at % n);
            self.wanted(dtype, 0.0, (0..k).map(|l| x.of(i, l) * w.of(j, l)))
        })?;
        let dx = device
            .memory
            .poisoned(|| device.linear_backward(&dy.tensor, &w.tensor, dtype))?;
        check(device, &backward, &dx, |at| {
            let (i, j) = (at / k, at % k);
            self.wanted(dtype, 0.0, (0..n).map(|l| dy.of(i, l) * w.of(l, j)))
        })?;
        device.add_linear_gradient(&gradient.tensor, &dy.tensor, &x.tensor)?;
        check(device, &weight, &gradient.tensor, |at| {
            let (i, j) = (at / k, at % k);
            let terms = (0..m).map(|l| dy.of(l, i) * x.of(l, j));
            self.wanted(DType::F32, gradient.at(at), terms)
        })
    }

    /// A sum of products added to what was there. Errors of sums in 32 bits grow with the terms' sizes, those of
    /// products with the root of their squares; the result is rounded once.
    fn wanted(&self, result: DType, before: f64, terms: impl Iterator<Item = f64>) -> Wanted {
        let (mut sum, mut sizes, mut squares) = (before, before.abs(), 0.0);
        for term in terms {
            sum += term;
            sizes += term.abs();
            squares += term * term;
        }
        let added = 8.0 * f64::from(f32::EPSILON) * sizes;
        let multiplied = 4.0 * self.element.product_error * f64::sqrt(squares);
        Wanted {
            value: sum,
            tolerance: rounding(result) * sum.abs() + added + multiplied,
        }
    }
}
