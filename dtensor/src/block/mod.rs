//! A traced block prepared to run on a device, and its forward and backward passes.

pub mod pass;
mod program;

pub use pass::{Forward, Parameters, Saved};
pub use program::{Attention, Block, Half, Keep, Step};
