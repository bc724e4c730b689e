//! The cpu device: runs traced blocks on real data in host memory.

mod accumulator;
mod attention;
mod block;
mod elementwise;
mod experts;
mod gemm;
mod machine;
mod math;
mod micro_batch;
mod nonlinear;
mod optimizer;
mod redistribute;
mod run;
mod tensor;
mod tokens;
mod tree;
mod value;
mod watch;

pub use accumulator::ExactSum;
pub use block::{GradientSink, Parameters, Saved, kept_bytes};
pub use dtensor::block::{Block, Half, Keep};
pub use machine::{CpuError, Machine, Numerics};
pub use math::add;
pub use micro_batch::MicroBatch;
pub use optimizer::{AdamWStep, Weights, adamw};
pub use redistribute::places;
pub use run::{Context, Forward, backward, forward};
pub use tensor::Tensor;
pub use tree::{FEATURE_LEAF, TOKEN_LEAF, TreeSum};
pub use value::Value;
pub use watch::{FirstNonFinite, Seen, Tensors, Watch, WatchError};
