//! What a pass needs of its rank on this device, and what it leaves for the next.

use std::sync::Arc;

use super::experts::Route;
use super::tensor::Tensor;
use super::tree::TreeSum;
use super::value::Value;
use dtensor::TensorId;
use dtensor::block;

/// Parameters of a block as a rank holds them now.
pub type Parameters<'p> = dyn block::Parameters<Tensor> + 'p;

/// Where gradients of weights go.
pub trait GradientSink {
    /// The sum of a parameter's gradients so far, to add to.
    fn plain(&mut self, id: TensorId) -> &mut [f32];
    /// Exact mode: nodes of a parameter's gradient. `range` is the part of the local parameter they
    /// are of: all of it, or one expert.
    fn tree(&mut self, id: TensorId, range: std::ops::Range<usize>, sum: TreeSum);
}

/// What a block keeps of a micro-batch between its passes.
pub type Saved = block::Saved<Arc<Value>, Arc<Route>>;

/// Bytes that a block keeps.
#[must_use]
pub fn kept_bytes(saved: &Saved) -> u64 {
    saved.values.values().map(|v| v.bytes()).sum()
}
