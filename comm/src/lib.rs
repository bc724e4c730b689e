//! Messages between ranks, and the collectives built on them.
//!
//! A transport only sends and receives. Every reduction is evaluated by our own code in a documented order, never by a
//! library.

pub mod bootstrap;
mod communicator;
pub mod frames;
mod group;
mod inbox;
pub mod local;
pub mod loopback;
mod meeting;
#[cfg(feature = "mpi")]
pub mod mpi;
mod outbox;
pub mod secret;
pub mod tcp;

pub use communicator::{CommError, Communicator, Message};
pub use group::{Group, Pending, pack, unpack};
