//! An operator to measure: its sizes, its kernels, and its operands.

use catalog::DType;
use catalog::profile::Kernel;
use cuda_device::{CudaError, Device};
use strum::VariantArray;

use crate::cuda::operands::{Tiled, Wanted, rounding};
use crate::cuda::timing::sets;

/// Relative tolerance: arithmetic is in 32 bits, with the device's own exponentials and roots.
pub(super) const ARITHMETIC: f64 = 2e-5;

/// Kind of operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum OperatorKind {
    /// Root-mean-square norm.
    RmsNorm,
    /// Layer norm.
    LayerNorm,
    /// GELU in its tanh approximation.
    Gelu,
    /// SwiGLU: `silu(gate) · up`.
    GatedSilu,
    /// Rotary position embedding over whole heads.
    Rope,
    /// Addition of two activations.
    Add,
    /// Softmax cross-entropy and its gradient.
    CrossEntropy,
}

/// Every kind of operator.
pub const OPERATORS: &[OperatorKind] = OperatorKind::VARIANTS;

/// An operator over `rows · columns` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operator {
    /// Kind of operator.
    pub kind: OperatorKind,
    /// Number of tokens.
    pub rows: u64,
    /// Number of features, or vocabulary entries.
    pub columns: u64,
    /// Element type of its tensors.
    pub dtype: DType,
}

impl Operator {
    /// Kernels of both directions as traces name them; the first of each carries the time. The loss computes its
    /// gradient in forward, from logits that are never widened to 32 bits.
    #[must_use]
    pub fn kernels(&self) -> [Vec<Kernel>; 2] {
        let named = |name: &str| Kernel::new(name, [self.rows, self.columns]);
        let dtype = format!("{:?}", self.dtype).to_lowercase();
        let name = match self.kind {
            OperatorKind::RmsNorm => "rms norm",
            OperatorKind::LayerNorm => "layer norm",
            OperatorKind::Gelu => "gelu tanh",
            OperatorKind::GatedSilu => "silu tanh gated",
            OperatorKind::Rope => "rotary embedding",
            OperatorKind::Add => "add",
            OperatorKind::CrossEntropy => {
                let all = ["cross-entropy forward f32", "cross-entropy backward f32"];
                return [all.map(named).into(), Vec::new()];
            }
        };
        ["forward", "backward"].map(|pass| vec![named(&format!("{name} {pass} {dtype}"))])
    }

    /// `N` tensors of the operator's shape for every set of operands.
    pub(super) fn operands<const N: usize>(
        &self,
        device: &Device,
    ) -> Result<Vec<[Tiled; N]>, CudaError> {
        let shape = [self.rows as usize, self.columns as usize];
        let bytes = N as u64 * self.rows * self.columns * self.dtype.size();
        (0..sets(bytes) as u64)
            .map(|set| {
                let mut made = Vec::with_capacity(N);
                for of in 0..N as u64 {
                    let seed = set * N as u64 + of;
                    made.push(Tiled::new(device, shape.into(), self.dtype, seed)?);
                }
                Ok(made
                    .try_into()
                    .unwrap_or_else(|_| unreachable!("made as many")))
            })
            .collect()
    }

    /// An expected value; its tolerance covers arithmetic up to `size` and rounding to this type.
    pub(super) fn near(&self, value: f64, size: f64) -> Wanted {
        let rounded = rounding(self.dtype) * value.abs();
        Wanted {
            value,
            tolerance: rounded + ARITHMETIC * size,
        }
    }
}
