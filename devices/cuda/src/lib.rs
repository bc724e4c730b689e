//! The cuda device: runs traced blocks on NVIDIA GPUs.

mod compile;
mod cudnn;
mod error;
mod facts;
mod gpu;
mod graph;
pub mod kernels;
pub mod launcher;
mod library;
mod links;
mod loading;
mod memory;
mod nccl;
mod ops;
mod probe;
mod products;
mod run;
mod sys;
mod tensor;

pub use compile::{CACHE, Compiler};
pub use cudnn::attention_workspaces;
pub use error::CudaError;
pub use facts::{Condition, condition};
pub use gpu::{Event, Gpu, Stream};
pub use graph::Graph;
pub use library::{LIBRARIES, Name};
pub use links::{Collective, EchoLinks, HostLinks, Links, NcclLinks, Ticket};
pub use loading::{FOLDERS, Loaded};
pub use memory::{Buffer, Memory, Reserved, Usage};
pub use nccl::NcclGroup;
pub use ops::{
    AttentionCall, Lies, Losses, Matrix8, NormGradient, Optimizer, Route, RowOrder, Weights,
};
pub use probe::{DeviceFacts, devices, ready};
pub use products::EIGHT_BITS;
pub use run::{
    Batch, Context, Forward, GradientSink, Machine, Parameters, Saved, backward, forward,
    kept_bytes,
};
pub use tensor::{Device, Tensor};
