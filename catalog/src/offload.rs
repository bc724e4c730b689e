//! Offload: which training states are kept in host memory, and which offload runtimes offer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use crate::dtype::DType;
use crate::parallelism::Zero;

/// States that are kept in host memory; the host's processors update the weights they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Offload {
    /// Optimizer states of this percentage of a rank's weights, from 1 to 100.
    Optimizer(u8),
    /// A rank's shares of parameters and gradients, and all its optimizer states.
    Parameters,
}

/// The kinds of [`Offload`].
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum OffloadKind {
    /// Optimizer states.
    Optimizer,
    /// Parameters, gradients and optimizer states.
    Parameters,
}

/// A kind of states that a runtime can be told to keep in host memory, and how its code does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OffloadOption {
    /// Which states.
    pub states: OffloadKind,
    /// Lowest ZeRO level at which the runtime can keep them there.
    pub from_zero: Zero,
    /// Whether the runtime can keep the states of some weights in host memory and those of the others on devices.
    #[serde(default)]
    pub partly: bool,
    /// Whether gradients are copied to the host as soon as they are reduced, beside backward, and leave the device; else
    /// they are copied when the optimizer step begins.
    pub gradients_in_backward: bool,
    /// Whether the device waits for gradients that the host adds to an earlier micro-batch's.
    #[serde(default)]
    pub accumulation_waits: bool,
    /// Whether sums of gradients over micro-batches are made on the device, although they lie in host memory. The
    /// device takes the sum of earlier micro-batches from the host, adds to it and copies it back, in the type of the gradients and on
    /// the stream that reduces them. After the last micro-batch it copies the sum once more, in 32 bits.
    #[serde(default)]
    pub device_adds_gradients: bool,
    /// Type in which updated parameters come back; `None` for the type of the device's parameters.
    #[serde(default)]
    pub returned: Option<DType>,
}

impl OffloadKind {
    /// Its name in strategies.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl Offload {
    /// The word for no offload.
    pub const NONE: &str = "none";

    /// Which kind of states is kept in host memory.
    #[must_use]
    pub fn kind(self) -> OffloadKind {
        match self {
            Self::Optimizer(_) => OffloadKind::Optimizer,
            Self::Parameters => OffloadKind::Parameters,
        }
    }

    /// The percentage of weights whose optimizer states are kept in host memory.
    #[must_use]
    pub fn percent(self) -> u64 {
        match self {
            Self::Optimizer(percent) => u64::from(percent),
            Self::Parameters => 100,
        }
    }

    /// As in strategies: `optimizer`, `optimizer:50` or `parameters`.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Optimizer(100) => "optimizer".to_owned(),
            Self::Optimizer(percent) => format!("optimizer:{percent}"),
            Self::Parameters => "parameters".to_owned(),
        }
    }

    /// Reads what [`Offload::name`] writes.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        match text {
            "optimizer" => Some(Self::Optimizer(100)),
            "parameters" => Some(Self::Parameters),
            _ => {
                let percent: u8 = text.strip_prefix("optimizer:")?.parse().ok()?;
                (1..=100)
                    .contains(&percent)
                    .then_some(Self::Optimizer(percent))
            }
        }
    }
}

impl OffloadOption {
    /// Whether this option can do `offload` at a ZeRO level.
    #[must_use]
    pub fn allows(&self, offload: Offload, zero: Zero) -> bool {
        self.states == offload.kind()
            && zero >= self.from_zero
            && (self.partly || offload.percent() == 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for offload in [
            Offload::Optimizer(100),
            Offload::Optimizer(50),
            Offload::Parameters,
        ] {
            assert_eq!(Offload::read(&offload.name()), Some(offload));
        }
        for wrong in [
            "optimizer:0",
            "optimizer:101",
            "optimizer:",
            "optimizer:-1",
            "all",
            "",
        ] {
            assert_eq!(Offload::read(wrong), None, "{wrong}");
        }
    }
}
