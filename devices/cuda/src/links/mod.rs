//! What carries tensors between the devices of ranks: NCCL, or the host.
//!
//! Collectives are asynchronous: they begin in the order of the device's work, and what is queued after
//! [`Links::wait`] comes after their end. Nothing here waits on the host but [`Links::settle`].

mod echo;
mod host;
mod lines;
mod nccl;

pub use echo::EchoLinks;
pub use host::HostLinks;
pub use lines::{Links, Ticket};
pub use nccl::NcclLinks;
