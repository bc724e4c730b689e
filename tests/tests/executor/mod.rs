//! Training under plans.

mod checkpoints;
mod cuda;
mod exact;
mod fast;
mod faults;
mod gpus;
mod gradients;
mod graphs;
mod jobs;
mod memory;
mod pytorch;
