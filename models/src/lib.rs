//! The model families, written once as single-device code over global tensors.

pub mod block;

pub use block::{BlockClass, BlockLayout};
