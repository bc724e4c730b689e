//! What it costs: lowering of traces for a runtime, prices, memory and the event simulator.

use plans::{Floors, Prediction, Strategy, Timeline};
use spec::{Cluster, ModelConfig, Runtime, Workload};

/// Everything a prediction depends on, beside the strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The model.
    pub model: ModelConfig,
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
    /// The device has no matrix rate for the asked precision.
    #[error("device {device} has no peak for {precision}")]
    NoPeak {
        /// Device preset.
        device: String,
        /// Asked precision.
        precision: String,
    },
}

/// Prices strategies of one scenario. Thread-safe; memoises layer costs by local shape.
#[derive(Debug)]
pub struct CostModel {
    scenario: Scenario,
}

impl CostModel {
    /// A cost model for a scenario.
    #[must_use]
    pub fn new(scenario: Scenario) -> Self {
        Self { scenario }
    }

    /// What it was made for.
    #[must_use]
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Lower bounds on time and memory, without simulation.
    pub fn floors(&self, _strategy: &Strategy) -> Result<Floors, CostError> {
        Err(CostError::Trace("not landed yet".into()))
    }

    /// Full simulation.
    pub fn predict(&self, _strategy: &Strategy) -> Result<Prediction, CostError> {
        Err(CostError::Trace("not landed yet".into()))
    }

    /// The simulated step, event by event.
    pub fn timeline(&self, _strategy: &Strategy) -> Result<Timeline, CostError> {
        Err(CostError::Trace("not landed yet".into()))
    }
}
