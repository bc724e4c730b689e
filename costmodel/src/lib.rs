//! What a strategy costs: lowering of traces for a runtime, prices, memory and the event simulator.
//!
//! How a prediction comes about: [`CostModel::predict`] assembles a strategy's stages from block costs
//! (`assemble`), each traced from the model, lowered for the runtime (`lower`) and priced
//! (`block`, `price`), and hands them to the engine (`engine`), which says when everything runs.
//! No IO, clock, randomness or global state.

mod activation_copies;
mod assemble;
mod block;
mod block_cost;
mod block_set;
mod blocks;
mod book;
mod bounds;
mod breakdown;
mod clipping;
mod cost_model;
mod crossings;
mod detailed;
mod drained;
mod engine;
mod error;
mod execution;
mod floors;
pub mod flops;
pub mod goodput;
mod graphed;
mod held;
mod imbalance;
mod in_flight;
mod issue;
mod known;
mod launches;
mod lower;
mod lower_bounds;
mod memo;
mod message_bounds;
mod messages;
mod module_visits;
mod of_rank;
mod offload;
mod pace;
mod passed_on;
mod picoseconds;
mod pipeline;
mod pools;
mod predict;
pub mod price;
mod quantities;
mod repeats;
pub mod replicas;
pub mod reshard;
mod scenario;
mod sequence;
mod shape;
mod shared_cores;
mod shared_tables;
mod sharing;
mod spread;
mod stage;
mod stage_pass;
mod stage_traffic;
pub mod states;
mod stragglers;
mod streams;
mod task_list;
mod tensorwise;
#[cfg(test)]
mod testing;
mod traffic;
mod work;

pub use block_cost::{BlockCost, BlockDetail, BlockGroups, BlockKey, Tensors};
pub use bounds::{LayoutBounds, Lightest, PipelineFloors, Senders};
pub use cost_model::{CostModel, Score};
pub use error::CostError;
pub use execution::Execution;
pub use held::{Held, Member};
pub use message_bounds::Messages;
pub use offload::least_states;
pub use quantities::check_precision;
pub use replicas::{Side, exchange, side_by_side};
pub use scenario::Scenario;
pub use shape::Shape;
pub use spread::Spread;
pub use work::{Backward, Work};
