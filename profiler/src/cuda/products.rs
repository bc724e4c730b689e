//! Measures GEMMs of linear layers: forward, gradient of the input, gradient of the weight.

use catalog::DType;
use catalog::profile::{Kernel, Measured};
use cuda_device::launcher::{Compute, Float8};
use cuda_device::{CudaError, Device, Lies, Matrix8, Tensor};

use super::operands::{Tiled, Wanted, check, rounding};
use super::timing::{sets, timed};
use crate::ProfilerError;
use crate::lanes::Effort;

/// Tolerance of a sum in 32 bits, in units of the 32-bit epsilon times the sum of its terms' magnitudes. Matrix units truncate
/// where other units round: on an H200 a sum of 32768 terms was 9 units off.
const ADDED: f64 = 32.0;

/// How a GEMM rounds its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// They stay as they are.
    Whole,
    /// They are rounded to TF32.
    Tf32,
    /// Casts them to FP8. A cast counts with one GEMM: both operands with forward, gradient of the
    /// output and weight with backward, input with the gradient of the weight.
    EightBits,
}

/// Element type of a GEMM, and how it rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// Name of the type in kernel names.
    pub name: &'static str,
    /// Type of operands and results; gradients of weights are in 32 bits.
    pub dtype: DType,
    /// How operands are rounded.
    pub way: Way,
    /// Relative error that multiplying two operands adds to their product.
    pub product_error: f64,
}

/// Element types that products are measured in.
pub const ELEMENTS: [Element; 4] = [
    Element {
        name: "bf16",
        dtype: DType::Bf16,
        way: Way::Whole,
        product_error: 0.0,
    },
    Element {
        name: "f8",
        dtype: DType::Bf16,
        way: Way::EightBits,
        // Rounding to 3 and 2 bits of mantissa changes a number by 0.026 and 0.052 in root mean square.
        product_error: 0.1,
    },
    Element {
        name: "tf32",
        dtype: DType::F32,
        way: Way::Tf32,
        // Two operands, each with 10 bits of mantissa.
        product_error: 1.0 / 1024.0,
    },
    Element {
        name: "f32",
        dtype: DType::F32,
        way: Way::Whole,
        product_error: 0.0,
    },
];

/// A linear layer, whose three GEMMs are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// Number of tokens.
    pub rows: u64,
    /// Input features.
    pub inputs: u64,
    /// Output features.
    pub outputs: u64,
    /// Element type and rounding.
    pub element: Element,
}

/// Operands of one set.
struct Operands {
    x: Tiled,
    w: Tiled,
    dy: Tiled,
    gradient: Tiled,
    /// Gradient of the output in FP8, as the GEMM before cast it.
    dy8: Option<Matrix8>,
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
        let dy = tiled([m, n], dtype, 2)?;
        let dy8 = match self.element.way {
            Way::EightBits => Some(device.cast8(&dy.tensor, Float8::E5m2, Lies::Columns)?),
            Way::Whole | Way::Tf32 => None,
        };
        Ok(Operands {
            x: tiled([m, k], dtype, 0)?,
            w: tiled([n, k], dtype, 1)?,
            dy,
            gradient: tiled([n, k], DType::F32, 3)?,
            dy8,
        })
    }

    fn forward(&self, device: &Device, set: &Operands) -> Result<Tensor, CudaError> {
        let (x, w) = (&set.x.tensor, &set.w.tensor);
        if set.dy8.is_none() {
            return device.linear(x, w, None, self.element.dtype);
        }
        let x = device.cast8(x, Float8::E4m3, Lies::Rows)?;
        let w = device.cast8(w, Float8::E4m3, Lies::Rows)?;
        let shape = [self.rows, self.outputs].map(|size| size as usize);
        device.linear8(&x, &w, None, shape.into())
    }

    fn backward(&self, device: &Device, set: &Operands) -> Result<Tensor, CudaError> {
        let (dy, w) = (&set.dy.tensor, &set.w.tensor);
        if set.dy8.is_none() {
            return device.linear_backward(dy, w, self.element.dtype);
        }
        let dy = device.cast8(dy, Float8::E5m2, Lies::Both)?;
        let w = device.cast8(w, Float8::E4m3, Lies::Columns)?;
        let shape = [self.rows, self.inputs].map(|size| size as usize);
        device.linear_backward8(&dy, &w, shape.into())
    }

    fn weight_gradient(device: &Device, set: &Operands) -> Result<(), CudaError> {
        let (x, gradient) = (&set.x.tensor, &set.gradient.tensor);
        let Some(dy) = &set.dy8 else {
            return device.add_linear_gradient(gradient, &set.dy.tensor, x);
        };
        let x = device.cast8(x, Float8::E4m3, Lies::Columns)?;
        device.add_linear_gradient8(gradient, dy, &x)
    }

    /// Checks and times all three GEMMs.
    ///
    /// # Errors
    /// When memory or the device fails, or a result differs from the host's.
    pub fn measure(&self, device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
        let compute = match self.element.way {
            Way::Tf32 => Compute::Tf32,
            Way::Whole | Way::EightBits => Compute::Whole,
        };
        let device = &device.clone().with_compute(compute);
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
            self.forward(device, set(call)).map(drop)
        })?;
        measured.extend(timed(device, effort, &[backward], |call| {
            self.backward(device, set(call)).map(drop)
        })?);
        measured.extend(timed(device, effort, &[weight], |call| {
            Self::weight_gradient(device, set(call))
        })?);
        Ok(measured)
    }

    fn check(&self, device: &Device, set: &Operands) -> Result<(), ProfilerError> {
        let dtype = self.element.dtype;
        let Operands {
            x, w, dy, gradient, ..
        } = set;
        let [forward, backward, weight] = self.kernels();
        let [m, n, k] = [self.rows, self.outputs, self.inputs].map(|size| size as usize);
        let y = device.memory.poisoned(|| self.forward(device, set))?;
        check(device, &forward, &y, |at| {
            let (i, j) = (at / n, at % n);
            self.wanted(dtype, 0.0, (0..k).map(|l| x.of(i, l) * w.of(j, l)))
        })?;
        let dx = device.memory.poisoned(|| self.backward(device, set))?;
        check(device, &backward, &dx, |at| {
            let (i, j) = (at / k, at % k);
            self.wanted(dtype, 0.0, (0..n).map(|l| dy.of(i, l) * w.of(l, j)))
        })?;
        Self::weight_gradient(device, set)?;
        check(device, &weight, &gradient.tensor, |at| {
            let (i, j) = (at / k, at % k);
            let terms = (0..m).map(|l| dy.of(l, i) * x.of(l, j));
            self.wanted(DType::F32, gradient.at(at), terms)
        })
    }

    /// Expected: `before` plus products. Errors of 32-bit sums grow with the terms' magnitudes,
    /// those of products with the root of the sum of squares; the result is rounded once.
    fn wanted(&self, result: DType, before: f64, terms: impl Iterator<Item = f64>) -> Wanted {
        let (mut sum, mut sizes, mut squares) = (before, before.abs(), 0.0);
        for term in terms {
            sum += term;
            sizes += term.abs();
            squares += term * term;
        }
        let added = ADDED * f64::from(f32::EPSILON) * sizes;
        let multiplied = 4.0 * self.element.product_error * f64::sqrt(squares);
        Wanted {
            value: sum,
            tolerance: rounding(result) * sum.abs() + added + multiplied,
        }
    }
}
