//! Fuzzing of every reader of the planner, in process, with nothing but stable Rust.
//!
//! A [`target::Target`] is a reader with the project's own files that it reads. An input is a change of
//! one of them ([`mutate`], [`tree`]); [`guard`] runs it and notes panics, time, memory and broken
//! promises; [`shard`] runs many in one process; [`campaign`] starts such processes, so that an input
//! that ends or hangs one costs that process alone. What an input was is a function of the seed.

pub mod campaign;
pub mod corpus;
pub mod guard;
pub mod memory;
pub mod mutate;
pub mod outcome;
pub mod promises;
pub mod rng;
pub mod scene;
pub mod shard;
pub mod target;
pub mod targets;
pub mod tree;
