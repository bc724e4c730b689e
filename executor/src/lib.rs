//! Training under a plan: ranks run the same actions that the simulator prices.

pub mod checkpoint;
mod data;
pub mod device;
mod error;
mod job;
mod mesh;
mod processes;
mod rank;
mod report;
mod settings;
mod stage;
mod train;

pub use data::Dataset;
pub use error::ExecutorError;
pub use job::Job;
pub use mesh::Mesh;
pub use processes::train_rank;
pub use report::{MemoryUse, RankReport, StepReport};
pub use settings::{AdamW, Execution, Settings};
pub use train::{Checkpoints, Observer, Outcome, Session, train, train_on};
