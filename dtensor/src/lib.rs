//! Global tensors: placements, propagation, redistribution, autograd tape; the meta device.

pub mod trace;

pub use trace::{
    AttentionShape, Collective, CollectiveKind, Op, OpKind, ParameterInfo, Pass, TensorId,
    TensorInfo, TensorRole, Trace,
};
