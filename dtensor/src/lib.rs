//! Distributed tensors: placements, their propagation through operators, redistribution and an autograd tape on the
//! meta device; and one rank's part of a training step on any device.

mod attention;
pub mod block;
pub mod epilogues;
pub mod error;
mod gradients;
mod kernel;
pub mod layout;
mod operator;
mod operators;
pub mod philox;
pub mod placement;
pub mod plan;
pub mod tape;
mod tensor;
mod trace;
pub mod train;

pub use attention::CausalAttention;
pub use epilogues::Epilogues;
pub use error::DTensorError;
pub use layout::BlockPosition;
pub use operator::{
    Attention, AttentionPiece, AttentionShape, Collective, CollectiveKind, Convolution, CostClass,
    Exchange, Expert, Factor, GatedNorm, GatedUnit, Gemm, Gradient, Moves, Nonlinearity, Norm,
    Operator, Pointwise, Product, Recurrent, Rotary, Route, Scan, ScanRule, Site, SoftmaxRule,
    Token,
};
pub use operators::{EIGHT_BIT_MULTIPLE, ScanWork};
pub use placement::{BLOCK_AXES, BlockMesh, Parts, Placement, Placements};
pub use plan::{Entry, RoutedRows, Routing, ShardingPlan};
pub use tape::{DTensor, Tape};
pub use tensor::{Columns, TensorId, TensorInfo, TensorRole, View, ViewKind};
pub use trace::{AnyOp, AttentionPieces, Op, ParameterInfo, Pass, Trace};
