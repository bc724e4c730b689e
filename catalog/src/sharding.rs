//! How runtimes treat sharded states between micro-batches, and jobs with unsharded states.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a runtime does once per step, not for every micro-batch, where ZeRO-3 or FSDP holds parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OncePerStep {
    /// Jobs that gather parameters once per step, if they keep them after forward. Other jobs free
    /// parameters after the backward of every micro-batch.
    pub gather: WhichJobs,
    /// Jobs that reduce gradients once per step and until then add them up unsharded. Other jobs
    /// reduce the gradients of every micro-batch and add them to a shard.
    pub reduce: WhichJobs,
}

/// A set of a runtime's jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WhichJobs {
    /// None of them.
    None,
    /// Those with pipeline parallelism.
    Pipelines,
    /// All of them.
    All,
}

impl WhichJobs {
    /// Whether a job with `pp` pipeline ranks is in the set.
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
    /// Whether jobs with `pp` pipeline ranks free parameters after forward by default: not with a
    /// pipeline if `gather` is `Pipelines` (torchtitan@b5bcd76, `distributed/fsdp.py`).
    #[must_use]
    pub fn reshards_by_default(self, pp: u64) -> bool {
        self.gather != WhichJobs::Pipelines || pp == 1
    }
}

/// How a runtime runs a job that shards no states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unsharded {
    /// Plainly: copies of the model reduce their gradients, and parameters held in 32 bits are cast by autocast.
    Plain,
    /// Plainly, but jobs with tensor or pipeline parallelism cast no parameters, and so train in 32 bits (torchtitan 0.2,
    /// `distributed/utils.py`, `maybe_enable_amp`).
    PlainWithoutCasts,
    /// As FSDP over groups of one rank (torchtitan@b5bcd76, `models/llama3/parallelize.py`).
    Fsdp,
}
