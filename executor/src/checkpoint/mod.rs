//! Checkpoints: weights and optimizer states by global name and global index, never by rank.
//!
//! What a rank owns is a set of [`Piece`]s. A load asks a [`Source`] for runs of elements and gets
//! them from whichever pieces hold them, so any layout loads what any other wrote: from disk, or
//! from the memory of a running job.

mod files;
mod hub;
mod manifest;
mod memory;
mod open;
mod piece;
mod problem;
mod rank_file;
mod store;
#[cfg(test)]
mod tests;

pub use hub::HubWeights;
pub(crate) use manifest::hex_of;
pub use manifest::{FileEntry, Manifest, RunIdentity};
pub use memory::Memory;
pub use open::{Checkpoint, ParameterEntry};
pub use piece::{Piece, Source, Triple};
pub(crate) use piece::{load, pieces};
pub(crate) use store::{Claim, Store, Written};
pub use store::{all, latest};
