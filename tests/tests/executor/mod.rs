//! Training under plans.

mod checkpoints;
mod exact;
mod gradients;
mod jobs;
mod memory;
mod pytorch;
