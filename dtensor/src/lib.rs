//! Global tensors: placements, propagation, redistribution, autograd tape; the meta device.

mod attention;
pub mod backward;
pub mod block;
pub mod epilogues;
pub mod error;
mod expert_ops;
mod kernel;
pub mod layout;
mod ops;
pub mod philox;
pub mod placement;
pub mod plan;
pub mod tape;
pub mod trace;

pub use attention::{AttentionPieces, CausalAttention};
pub use epilogues::Epilogues;
pub use error::DTensorError;
pub use layout::BlockPosition;
pub use ops::Nonlinearity;
pub use placement::{BLOCK_AXES, BlockMesh, Parts, Placement, Placements};
pub use plan::{Entry, RoutedRows, Routing, ShardingPlan};
pub use tape::{DTensor, Tape};
pub use trace::{
    AttentionShape, Collective, CollectiveKind, Columns, Detail, Op, OpKind, ParameterInfo, Pass,
    SoftmaxRule, TensorId, TensorInfo, TensorRole, Trace, View, ViewKind,
};
