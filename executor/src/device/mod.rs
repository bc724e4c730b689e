//! The devices that ranks compute on. Ranks, stages and states are written once, generic over [`Device`].

mod cpu;
mod cuda;
mod interface;

pub use cpu::{Cores, Cpu};
pub use cuda::{Cuda, Gpus, Messages, on};
pub use interface::{Device, Devices};
