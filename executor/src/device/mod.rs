//! What a rank computes on, and how it reaches other ranks. Ranks, stages and states are written once, over
//! [`Device`].

mod cpu;
mod cuda;
mod interface;

pub use cpu::{Cores, Cpu};
pub use cuda::{Cuda, Gpus, Messages, on};
pub use interface::{Device, Devices};
