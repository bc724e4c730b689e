//! Training under plans.

mod checkpoints;
mod exact;
mod jobs;
mod memory;
