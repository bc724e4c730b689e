//! An operator to measure: its sizes, its kernels, and its operands.

use catalog::DType;
use catalog::profile::Kernel;
use cuda_device::{CudaError, Device};

use crate::cuda::operands::{Tiled, Wanted, rounding};
use crate::cuda::timing::sets;

/// Arithmetic is in 32 bits, exponentials and roots by the device's own functions.
pub(super) const ARITHMETIC: f64 = 2e-5;

/// Which operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperatorKind {
    /// Root-mean-square norm.
    RmsNorm,
    /// Layer norm.
    LayerNorm,
    /// GELU by its tanh approximation.
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

/// All of them.
pub const OPERATORS: [OperatorKind; 7] = [
    OperatorKind::RmsNorm,
    OperatorKind::LayerNorm,
    OperatorKind::Gelu,
    OperatorKind::GatedSilu,
    OperatorKind::Rope,
    OperatorKind::Add,
    OperatorKind::CrossEntropy,
];

/// An operator over `rows · columns` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operator {
    /// Which.
    pub kind: OperatorKind,
    /// Tokens.
    pub rows: u64,
    /// Features, or entries of the vocabulary.
    pub columns: u64,
    /// Element type.
    pub dtype: DType,
}

impl Operator {
    /// Kernels of both directions as traces name them: the first of each takes the time. The loss computes its
    /// gradient forward, from logits that nobody widens.
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

    /// `N` operands of every set.
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

    /// A result of numbers up to `size`, rounded to the operator's type.
    pub(super) fn near(&self, value: f64, size: f64) -> Wanted {
        let rounded = rounding(self.dtype) * value.abs();
        Wanted {
            value,
            tolerance: rounded + ARITHMETIC * size,
        }
    }
}
