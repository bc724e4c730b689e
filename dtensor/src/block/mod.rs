//! A traced block made ready to run on a device, and its passes.

pub mod pass;
mod program;

pub use pass::{Forward, Parameters, Saved};
pub use program::{Attention, Block, Half, Keep, Step};
