//! What it costs: lowering of traces for a runtime, prices, memory and the event simulator.
//!
//! The path of a number: [`CostModel::predict`] assembles a strategy's stages from block costs
//! (`assemble`), each traced from the model, lowered for the runtime (`lower`) and priced
//! (`block`, `price`), and hands them to the engine (`engine`), which says when everything runs.
//! No IO, clock, randomness or global state.

mod assemble;
mod block;
mod cost_model;
mod engine;
mod floors;
pub mod flops;
mod held;
mod local;
mod lower;
mod messages;
mod peak;
mod predict;
pub mod price;
mod profile;
mod quantities;
mod recorder;
mod shared_cores;
mod stage;
pub mod states;
mod tensorwise;
mod traffic;
mod work;

use catalog::{Cluster, Model, Runtime, Workload};

pub use block::{BlockCost, BlockGroups, BlockKey, BlockPricing};
pub use cost_model::{CostModel, Score};
pub use held::Held;
pub use tensorwise::Tensors;
pub use work::Work;

/// Everything a prediction depends on, beside the strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The model.
    pub model: Model,
    /// The cluster.
    pub cluster: Cluster,
    /// The training system.
    pub runtime: Runtime,
    /// Sequence, batch, precision, devices.
    pub workload: Workload,
    /// Fraction of device memory to leave free, in `[0, 1)`.
    pub headroom: f64,
}

/// Why a strategy has no price.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostError {
    /// The model cannot be traced under this layout.
    #[error("{0}")]
    Trace(String),
    /// The device or network has no prices.
    #[error("no prices for device {device}: {reason}")]
    Prices {
        /// Device preset.
        device: String,
        /// Why.
        reason: String,
    },
    /// The profile of this machine lacks a kernel.
    #[error(
        "the profile has no measurement of `{kernel}`; `vescale-plan profile PLAN` (for GPUs with `--device cuda`) measures what a plan needs"
    )]
    NotMeasured {
        /// Kernel.
        kernel: String,
    },
    /// A message between GPUs was not measured.
    #[error(
        "the profile has no measurement of `{message}` between {ranks} GPUs; `vescale-plan profile --device cuda --gpus {ranks}` measures it"
    )]
    MessageNotMeasured {
        /// Message.
        message: String,
        /// GPUs of its group.
        ranks: u64,
    },
    /// A rate or time of the scenario is not a usable number.
    #[error("{name} is {value}: expected a {expected}")]
    Quantity {
        /// What.
        name: String,
        /// As given.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// The sum of a strategy's times is beyond what a number holds.
    #[error(
        "the predicted step time is not finite: some time or rate of the cluster or runtime is extreme"
    )]
    Endless,
    /// The device has no matrix rate for the asked precision.
    #[error("device {device} has no peak for {precision}")]
    NoPeak {
        /// Device preset.
        device: String,
        /// Asked precision.
        precision: String,
    },
}
