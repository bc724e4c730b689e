//! Training under plans.

mod checkpoints;
mod exact;
mod fast;
mod faults;
mod gradients;
mod jobs;
mod memory;
mod pytorch;
