//! How far ahead of their use parameters are gathered under ZeRO-3.

use serde::{Deserialize, Serialize};

/// How far ahead of their use a runtime can be told to gather the parameters of blocks, which ZeRO-3 gathers for every pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefetchOption {
    /// Number of blocks ahead: with 0 a block's gather begins when the block before has ended.
    pub blocks: u64,
    /// The same in forward, if it is another number there.
    #[serde(default)]
    pub forward: Option<u64>,
}

/// How many blocks ahead parameters are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// In forward.
    pub forward: u64,
    /// In backward.
    pub backward: u64,
}

impl Ahead {
    /// One block in both passes: what systems do by themselves.
    pub const USUAL: Self = Self {
        forward: 1,
        backward: 1,
    };

    /// Number of blocks that are gathered at one time: the one that runs, and those ahead of it.
    #[must_use]
    pub fn blocks(self) -> u64 {
        1 + self.forward.max(self.backward)
    }
}
