//! One rank of a training job: runs its action list step after step.

mod captured;
mod member;
mod micro_batch;
mod step;
mod times;
mod update;

pub(crate) use member::Rank;
