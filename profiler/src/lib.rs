//! Measures this machine: kernels of the cpu device as the executor runs them, the optimizer, and
//! messages between ranks; and the kernels of a GPU (`cuda`).
//!
//! Blocks are measured whole, so that every operator runs on operands as warm or cold as in
//! training, and on as many ranks at a time as will share the machine; a rank's peers are echoes
//! of itself, so that what it computes for a collective is measured without waiting.

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
