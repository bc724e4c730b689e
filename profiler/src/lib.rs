//! Measures this machine: kernels of the cpu device as the executor runs them, the optimizer, and messages between
//! ranks; and the kernels of GPUs (`cuda`).
//!
//! Blocks are measured whole, so that operands are as warm or cold in caches as in training, and on as many ranks side
//! by side as will share the machine. A rank's peers are echoes of itself, so that its own work for a collective is
//! measured without waiting.

mod blocks;
pub mod cuda;
mod error;
mod lanes;
mod machine;
mod primitives;
mod visits;

pub use blocks::{BlockRequest, blocks};
pub use error::ProfilerError;
pub use lanes::Effort;
pub use machine::machine;
pub use primitives::{messages, states};
pub use visits::{VISITS, middle};
