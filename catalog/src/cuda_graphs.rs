//! Which part of a step is captured in CUDA graphs, which a GPU replays without the host issuing every kernel.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

/// The part of a step that is captured, from nothing to all of it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum CudaGraphs {
    /// Nothing: the host issues every kernel.
    None,
    /// Each layer by itself, without experts and token exchange (Megatron-Core's modules `attn`,
    /// `mlp`, `moe_router` and `moe_preprocess`, which prepares the exchange).
    Layers,
    /// All passes of the step.
    Step,
}

impl CudaGraphs {
    /// Every choice.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name in strategies and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A part of a step that a runtime can be told to capture, and for which jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GraphOption {
    /// What is captured.
    pub captures: CudaGraphs,
    /// Whether it also works with pipeline parallelism.
    pub pipelines: bool,
    /// Whether it also works for models with experts. A whole step is never captured with expert
    /// parallelism, because the host reads how many tokens have arrived.
    pub experts: bool,
}
