//! The cuda device where there is no GPU: its kernels compile, and on an emulator of CUDA's threads they
//! compute what they should.

#[path = "cuda/blocks.rs"]
mod blocks;
#[path = "cuda/compile.rs"]
mod compile;
#[path = "cuda/cudnn.rs"]
mod cudnn;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/gpu.rs"]
mod gpu;
#[path = "cuda/graphs.rs"]
mod graphs;
#[path = "cuda/kernels/mod.rs"]
mod kernels;
