//! Measures memory-bound operators, forward and backward: norms, activations, rotary embedding, additions, the loss.
//! One file per group of kernels.

mod loss;
mod norm;
mod operator;
mod pointwise;

use catalog::profile::Measured;
use cuda_device::Device;

use crate::ProfilerError;
use crate::lanes::Effort;

pub use operator::{OPERATORS, Operator, OperatorKind};

impl Operator {
    /// Checks and times the operator.
    ///
    /// # Errors
    /// When memory or the device fails, or a result differs from the host's.
    pub fn measure(&self, device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
        match self.kind {
            OperatorKind::RmsNorm | OperatorKind::LayerNorm => norm::measure(self, device, effort),
            OperatorKind::Gelu => pointwise::gelu(self, device, effort),
            OperatorKind::GatedSilu => pointwise::gated(self, device, effort),
            OperatorKind::Rope => pointwise::rope(self, device, effort),
            OperatorKind::Add => pointwise::add(self, device, effort),
            OperatorKind::CrossEntropy => loss::measure(self, device, effort),
        }
    }
}
