//! The cpu device: runs traced blocks on real data.

mod accumulator;
mod attention;
mod block;
mod elementwise;
mod experts;
mod gemm;
mod machine;
mod math;
mod nonlinear;
mod optimizer;
mod redistribute;
mod run;
mod tensor;
mod tokens;
mod tree;
mod watch;

pub use accumulator::ExactSum;
pub use block::{GradientSink, Parameters, Saved, kept_bytes};
pub use dtensor::block::{Block, Half, Keep};
pub use machine::{CpuError, Machine, MicroBatch, Numerics};
pub use optimizer::{AdamWStep, Weights, adamw};
pub use redistribute::places;
pub use run::{Context, Forward, backward, forward};
pub use tensor::{Tensor, Value};
pub use tree::{FEATURE_LEAF, TOKEN_LEAF, TreeSum};
pub use watch::{FirstNonFinite, Seen, Tensors, Watch, WatchError};
