//! Training under plans.

mod exact;
mod jobs;
mod memory;
