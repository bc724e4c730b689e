//! Plans and what they are made of: strategies, meshes, schedules, programs, timelines, predictions and plan files.

pub mod decisions;
pub mod divided;
mod falling;
pub mod grammar;
mod groups;
pub mod json;
pub mod legality;
pub mod mesh;
pub mod partition;
pub mod place;
pub mod plan_file;
pub mod prediction;
pub mod present;
pub mod program;
pub mod schedule;
mod sharding_file;
pub mod strategy;
mod strategy_mistake;
pub mod strategy_words;
pub mod support;
pub mod timeline;

pub use catalog::{Axis, AxisOrder, CpKind, Overlap, ScheduleKind, Zero};
pub use decisions::{Decisions, Recompute};
pub use groups::{GroupFile, GroupJson, ReplicaGroup};
pub use legality::StrategyError;
pub use mesh::Group;
pub use partition::StagePartition;
pub use plan_file::PlanFile;
pub use prediction::{
    Breakdown, Candidate, EVEN, Fit, Floors, HostMemory, MemoryItem, NamedTime, Prediction,
    Relaxation, SearchOutcome, SpaceReport, UsedConstant, by_plan, may_choose,
};
pub use present::{Change, Present};
pub use program::Program;
pub use schedule::{Action, ActionKind, Schedule};
pub use strategy::Strategy;
pub use timeline::{Event, Stream, Timeline};
