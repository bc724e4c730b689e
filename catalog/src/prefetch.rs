//! How far ahead of their use parameters are gathered under ZeRO-3.

use serde::{Deserialize, Serialize};

/// A choice that a runtime offers under ZeRO-3: how many blocks before its use the parameters of a block are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefetchOption {
    /// Number of blocks. With 0, a block's gather begins when the block before it has ended.
    pub blocks: u64,
    /// The number in forward passes, if it differs there.
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
