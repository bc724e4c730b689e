//! The host of a node, to whose memory devices can copy states and activations.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::above_zero;
use crate::provenance::Sourced;
use crate::units::{Bandwidth, Bytes};

/// The processors and memory of a node, which its devices share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Peak rate between one device and the host's memory, in each direction: PCI Express, or NVLink-C2C.
    pub link: Sourced<Bandwidth>,
    /// Peak bandwidth of the memory of a whole node.
    pub memory_bandwidth: Sourced<Bandwidth>,
    /// Memory of a whole node; absent if it is not known.
    #[serde(default)]
    pub memory: Option<Sourced<Bytes>>,
}

/// Largest bandwidth of a host, far above any that is made.
const MAX_BANDWIDTH: Bandwidth = Bandwidth(1e15);
/// Largest memory of a node, far above any that is made.
const MAX_MEMORY: Bytes = Bytes(1 << 50);

impl Host {
    /// Checks that bandwidths and memory are in range.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, rate) in [
            ("link", self.link.value),
            ("memory_bandwidth", self.memory_bandwidth.value),
        ] {
            above_zero(rate, MAX_BANDWIDTH).map_err(|wrong| format!("{name} {wrong}"))?;
        }
        let memory = self
            .memory
            .as_ref()
            .map_or(MAX_MEMORY, |memory| memory.value);
        above_zero(memory, MAX_MEMORY).map_err(|wrong| format!("memory {wrong}"))
    }
}
