//! Operators on a device's tensors: which kernels run, with which launch dimensions. One Rust file per file of kernels.

mod attention;
mod eight_bits;
mod elementwise;
mod expert;
mod grid;
mod norm;
mod optimizer;
mod product;
mod reduce;
mod scale;
mod token;

pub use attention::AttentionCall;
pub use eight_bits::{Lies, Matrix8};
pub use expert::{Level, Route};
pub use norm::NormGradient;
pub use optimizer::{Optimizer, Weights};
pub use token::{Losses, RowOrder};
