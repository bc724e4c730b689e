//! What runtimes do where states are sharded, between the micro-batches of a step, and where they are not.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a runtime does under ZeRO-3 once per step rather than for every micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OncePerStep {
    /// Jobs that gather parameters once, if these are not freed after forward. Others free them after backward.
    pub gather: Jobs,
    /// Jobs that reduce gradients once: those of several micro-batches add up unsharded. Others add them to a shard.
    pub reduce: Jobs,
}

/// Jobs of a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Jobs {
    /// None of them.
    None,
    /// Those with pipeline parallelism.
    Pipelines,
    /// All of them.
    All,
}

impl Jobs {
    /// Whether a job with so many pipeline ranks is one of them.
    #[must_use]
    pub fn contains(self, pp: u64) -> bool {
        match self {
            Self::None => false,
            Self::Pipelines => pp > 1,
            Self::All => true,
        }
    }
}

impl OncePerStep {
    /// Whether a job with so many pipeline ranks frees parameters after forward, if it says nothing of it. torchtitan does not in
    /// pipelines, where every micro-batch would gather them again (torchtitan@b5bcd76, `distributed/fsdp.py`).
    #[must_use]
    pub fn reshards_by_default(self, pp: u64) -> bool {
        self.gather != Jobs::Pipelines || pp == 1
    }
}

/// How a runtime runs a job that shards no states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unsharded {
    /// Plainly: copies of the model reduce their gradients, and parameters held in 32 bits are cast by autocast.
    Plain,
    /// Plainly, but nothing casts parameters beside tensor or pipeline parallelism: such a job trains in 32 bits
    /// (torchtitan 0.2, `distributed/utils.py`, `maybe_enable_amp`).
    PlainWithoutCasts,
    /// As FSDP over groups of one rank (torchtitan@b5bcd76, `models/llama3/parallelize.py`).
    Fsdp,
}
