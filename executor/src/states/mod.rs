//! Parameters, gradients and optimizer states of a virtual stage on one rank.

mod block;
mod buckets;
mod partition;
mod reduce;
mod zero;

pub use partition::Sharing;
pub use zero::States;
