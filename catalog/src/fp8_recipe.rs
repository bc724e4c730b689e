//! How the operands of 8-bit products are scaled into the range of their numbers, and on which GPUs each way exists.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::device::Architecture;
use crate::selection::{RecomputeModule, Selection};

/// A way to scale the operands of 8-bit products. The names are those of Megatron-Core and torchao.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Fp8Recipe {
    /// One scale for a tensor, from the largest magnitudes of earlier steps.
    Delayed,
    /// One scale for a tensor, from its own largest magnitude, which is found before the tensor is cast.
    Tensorwise,
    /// One scale for every row.
    Rowwise,
    /// One scale for 128 numbers of an activation, and for 128 × 128 of a weight, as DeepSeek-V3 was trained.
    Blockwise,
    /// One scale for 32 numbers, which tensor cores apply themselves (OCP microscaling).
    Mxfp8,
}

impl Fp8Recipe {
    /// Every way.
    pub const ALL: [Self; 5] = [
        Self::Delayed,
        Self::Tensorwise,
        Self::Rowwise,
        Self::Blockwise,
        Self::Mxfp8,
    ];

    /// Its name in strategies and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Delayed => "delayed",
            Self::Tensorwise => "tensorwise",
            Self::Rowwise => "rowwise",
            Self::Blockwise => "blockwise",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// Whether it exists on all GPUs of a cluster that have 8-bit products.
    ///
    /// Transformer Engine multiplies by blocks of 128 on Hopper and microscaled numbers on Blackwell
    /// (NVIDIA/TransformerEngine@8f2e635, docs/examples/fp8_primer); PyTorch scales rows from Hopper on
    /// (`torch._scaled_mm`). Blackwell's cards on PCI Express have compute capability 12.0, for which Transformer Engine refuses
    /// microscaled numbers (NVIDIA/TransformerEngine@d0067d0, `quantization.py`). A cluster on PCI Express is taken to have such cards.
    #[must_use]
    pub fn exists_on(self, cluster: &Cluster) -> bool {
        if let Some(pools) = &cluster.pools {
            let mut clusters = pools.parts.iter().map(|pool| &pool.cluster);
            return clusters.all(|cluster| self.exists_on(cluster));
        }
        let architecture = cluster.device.architecture;
        match self {
            Self::Delayed | Self::Tensorwise => true,
            Self::Rowwise => matches!(architecture, Architecture::Hopper | Architecture::Blackwell),
            Self::Blockwise => architecture == Architecture::Hopper,
            Self::Mxfp8 => architecture == Architecture::Blackwell && !cluster.pci_express,
        }
    }

    /// The parts of a selection that cannot be recomputed with it, if there are any
    /// (NVIDIA/Megatron-LM@d98e8a6, transformer_config.py: "Delayed scaling does not support moe_act and layernorm recompute").
    #[must_use]
    pub fn cannot_recompute(self, selection: Selection) -> Option<Selection> {
        let parts = [RecomputeModule::Norms, RecomputeModule::ExpertActivation];
        let parts = selection.and(parts.into_iter().collect());
        Some(parts).filter(|parts| self == Self::Delayed && *parts != Selection::default())
    }
}
