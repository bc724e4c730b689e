//! What training systems do with the modules of a model that predict later tokens (multi-token prediction).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a training system does with a model's prediction modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PredictionModules {
    /// It trains them.
    Trained,
    /// It trains them only where neither a pipeline nor context parallelism divides the model.
    Undivided,
    /// It builds none, and trains the model without them.
    LeftOut,
}
