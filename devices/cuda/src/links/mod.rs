//! Exchanges of tensors between the devices of ranks: by NCCL, or through the host.
//!
//! Exchanges by NCCL are asynchronous: each begins after the work queued before it, and work queued
//! after [`Links::wait`] begins after its end. Exchanges through the host block the host.

mod echo;
mod host;
mod lines;
mod nccl;

pub use echo::EchoLinks;
pub use host::HostLinks;
pub use lines::{Collective, Links, Ticket};
pub use nccl::NcclLinks;
