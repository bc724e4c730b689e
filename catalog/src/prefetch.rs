//! How far ahead of their use parameters are gathered under ZeRO-3, and how many gradients wait to be reduced.

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

/// How much of a rank's weights a runtime holds whole at one time under ZeRO-2 and ZeRO-3, if elements decide it, not blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeldWhole {
    /// Parameters that are gathered ahead of their use: layers are gathered until there are this many, and at least one.
    pub ahead: u64,
    /// Gradients that wait to be reduced: before those of the next layer come, older ones are freed until there are no more than this, or
    /// than two layers have.
    pub unreduced: u64,
}

impl HeldWhole {
    /// Number of parameters that are gathered at one time: of the layer that runs, and ahead of it. Each layer has `layer` of them.
    #[must_use]
    pub fn gathered(self, layer: u64) -> u64 {
        match layer {
            0 => 0,
            _ => layer.saturating_mul(1 + self.ahead.div_ceil(layer)),
        }
    }

    /// Number of gradients that are not reduced at one time, with those of the layer that has just run.
    #[must_use]
    pub fn waiting(self, layer: u64) -> u64 {
        match layer {
            0 => 0,
            _ => layer.saturating_mul(1 + (self.unreduced / layer).max(2)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HeldWhole;

    #[test]
    fn layers_are_held_until_they_have_enough_elements() {
        let of = HeldWhole {
            ahead: 500,
            unreduced: 1000,
        };
        // For layers of a size: elements gathered, and gradients not reduced.
        for (layer, gathered, waiting) in [
            (0, 0, 0),
            (100, 600, 1100),
            (300, 900, 1200),
            (800, 1600, 2400),
        ] {
            let found = (of.gathered(layer), of.waiting(layer));
            assert_eq!(found, (gathered, waiting), "{layer}");
        }
    }
}
