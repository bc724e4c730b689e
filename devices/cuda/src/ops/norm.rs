//! Layer and RMS norms.

use catalog::DType;
use catalog::model::NormKind;

use super::grid::{EACH, threads_of, unsupported};
use crate::error::CudaError;
use crate::kernels::{Kernel, typed};
use crate::launcher::Arguments;
use crate::tensor::{Device, Tensor};

/// Columns that a block of the most threads covers in one pass.
const NARROW: usize = 1024 * EACH;
/// Columns that a block of half as many threads covers in four passes.
const WIDE: usize = 512 * EACH * 4;
/// Threads of the backward kernel that an SM has registers for, which bounds the rows processed at a time.
const AT_ONCE: u32 = 1024;

/// What the backward of a norm reads, and where it adds the gradients of the parameters.
#[derive(Clone, Copy, Debug)]
pub struct NormGradient<'n> {
    /// LayerNorm or RMSNorm.
    pub kind: NormKind,
    /// Whether the factor is one plus the weight, as in Gemma.
    pub from_one: bool,
    /// Gradient of the output.
    pub dy: &'n Tensor,
    /// Input of the norm.
    pub x: &'n Tensor,
    /// Weight of the norm.
    pub weight: &'n Tensor,
    /// Statistics of every row, as forward left them.
    pub statistics: &'n Tensor,
    /// Gradient of the weight, which is added to.
    pub d_weight: &'n Tensor,
    /// Gradient of the bias, which is added to.
    pub d_bias: Option<&'n Tensor>,
}

fn kernels(kind: NormKind, columns: usize, bf16: bool) -> Result<([Kernel; 2], u32), CudaError> {
    let wide = columns > NARROW;
    if columns > WIDE {
        let reason = format!("rows of {columns} elements, more than {WIDE}");
        return Err(unsupported("a norm", reason));
    }
    let pair = match (kind, wide) {
        (NormKind::LayerNorm, false) => [
            typed!(Norm, "layer_norm", bf16),
            typed!(Norm, "layer_norm_backward", bf16),
        ],
        (NormKind::LayerNorm, true) => [
            typed!(Norm, "layer_norm_wide", bf16),
            typed!(Norm, "layer_norm_backward_wide", bf16),
        ],
        (NormKind::RmsNorm, false) => [
            typed!(Norm, "rms_norm", bf16),
            typed!(Norm, "rms_norm_backward", bf16),
        ],
        (NormKind::RmsNorm, true) => [
            typed!(Norm, "rms_norm_wide", bf16),
            typed!(Norm, "rms_norm_backward_wide", bf16),
        ],
    };
    Ok((pair, threads_of(columns, if wide { 512 } else { 1024 })))
}

impl Device {
    /// A norm over the last dim, given its kind, epsilon, and whether the factor is one plus the weight; also returns
    /// the statistics of every row.
    ///
    /// # Errors
    /// When memory or the device fails, or rows are too long.
    pub fn norm(
        &self,
        (kind, epsilon, from_one): (NormKind, f64, bool),
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor), CudaError> {
        let (rows, columns) = (x.rows(), x.columns());
        let ([kernel, _], threads) = kernels(kind, columns, x.is_bf16())?;
        let out = self.tensor(x.shape.clone(), x.dtype)?;
        let each = if kind == NormKind::LayerNorm { 2 } else { 1 };
        let statistics = self.tensor(vec![rows, each], DType::F32)?;
        let arguments = Arguments::of(&[&out, &statistics, &x, &weight, &bias])
            .sizes([columns])
            .with(epsilon as f32)
            .with(f32::from(from_one));
        self.blocks(kernel, [rows as u32, 1, 1], threads, 0, arguments)?;
        Ok((out, statistics))
    }

    /// The gradient of a norm's input, if asked for; adds the gradients of its parameters.
    ///
    /// # Errors
    /// When memory or the device fails, or rows are too long.
    pub fn norm_backward(
        &self,
        norm: &NormGradient<'_>,
        input: bool,
    ) -> Result<Option<Tensor>, CudaError> {
        let x = norm.x;
        let (rows, columns) = (x.rows(), x.columns());
        let ([_, kernel], threads) = kernels(norm.kind, columns, x.is_bf16())?;
        let dx = match input {
            true => Some(self.tensor(x.shape.clone(), x.dtype)?),
            false => None,
        };
        let each = (AT_ONCE / threads).max(1) * self.launcher.multiprocessors();
        let blocks = rows.min(each as usize);
        let partial = |wanted: bool| match wanted {
            true => self.tensor(vec![blocks, columns], DType::F32).map(Some),
            false => Ok(None),
        };
        let (weights, biases) = (partial(true)?, partial(norm.d_bias.is_some())?);
        let arguments = Arguments::of(&[
            &dx,
            &weights,
            &biases,
            &norm.dy,
            &x,
            &norm.weight,
            &norm.statistics,
        ])
        .sizes([rows, columns])
        .with(f32::from(norm.from_one));
        self.blocks(kernel, [blocks as u32, 1, 1], threads, 0, arguments)?;
        let gradients = [Some(norm.d_weight), norm.d_bias];
        for (partial, gradient) in [weights, biases].iter().zip(gradients) {
            if let (Some(partial), Some(gradient)) = (partial, gradient) {
                self.add_lines(gradient, partial)?;
            }
        }
        Ok(dx)
    }
}
