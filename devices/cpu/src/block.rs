//! Types of a block's passes on the cpu device: its parameters, its gradients, and what it keeps for backward.

use std::sync::Arc;

use super::experts::Route;
use super::tensor::Tensor;
use super::tree::TreeSum;
use super::value::Value;
use dtensor::TensorId;
use dtensor::block;

/// Parameters of a block as this rank holds them, with its sharding.
pub type Parameters<'p> = dyn block::Parameters<Tensor> + 'p;

/// Receives the gradients of weights.
pub trait GradientSink {
    /// The buffer in which a parameter's gradient accumulates, to add to.
    fn plain(&mut self, id: TensorId) -> &mut [f32];
    /// Exact mode: adds tree nodes of a parameter's gradient. `range` is the part of the local parameter that they
    /// cover: all of it, or one expert.
    fn tree(&mut self, id: TensorId, range: std::ops::Range<usize>, sum: TreeSum);
}

/// What a block keeps of a micro-batch from forward to backward.
pub type Saved = block::Saved<Arc<Value>, Arc<Route>>;

/// Bytes of memory that a block's saved tensors take.
#[must_use]
pub fn kept_bytes(saved: &Saved) -> u64 {
    saved.values.values().map(|v| v.bytes()).sum()
}
