//! FP8 recipes: how the operands of 8-bit products are scaled, and which GPUs have each recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

use crate::cluster::Cluster;
use crate::device::Architecture;
use crate::selection::{RecomputeModule, Selection};

/// A way to scale the operands of 8-bit products. The names are those of Megatron-Core and torchao.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Fp8Recipe {
    /// One scale per tensor, from the largest magnitudes of earlier steps.
    Delayed,
    /// One scale per tensor, from its own largest magnitude, found before the tensor is cast.
    Tensorwise,
    /// One scale per row.
    Rowwise,
    /// One scale per 128 numbers of an activation and 128 × 128 of a weight (DeepSeek-V3).
    Blockwise,
    /// One scale per 32 numbers, which tensor cores apply themselves (OCP microscaling).
    Mxfp8,
}

impl Fp8Recipe {
    /// Every way.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name in strategies and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether this recipe can be used on every GPU of a cluster, if the GPU has 8-bit matrix products at all.
    ///
    /// - Transformer Engine scales blocks of 128 elements on Hopper, and uses microscaled numbers (MXFP8) on Blackwell
    ///   (NVIDIA/TransformerEngine@8f2e635, docs/examples/fp8_primer).
    /// - It refuses MXFP8 from compute capability 12.0 on, that of Blackwell's RTX cards (NVIDIA/TransformerEngine@d0067d0,
    ///   `quantization.py`).
    /// - PyTorch scales rows on Hopper and later (`torch._scaled_mm`).
    #[must_use]
    pub fn exists_on(self, cluster: &Cluster) -> bool {
        if let Some(pools) = &cluster.pools {
            let mut clusters = pools.parts.iter().map(|pool| &pool.cluster);
            return clusters.all(|cluster| self.exists_on(cluster));
        }
        let architecture = cluster.device.architecture;
        match self {
            Self::Delayed | Self::Tensorwise => true,
            Self::Rowwise => matches!(
                architecture,
                Architecture::Hopper | Architecture::Blackwell | Architecture::BlackwellRtx
            ),
            Self::Blockwise => architecture == Architecture::Hopper,
            Self::Mxfp8 => architecture == Architecture::Blackwell,
        }
    }

    /// The parts that it cannot recompute; `None` if there are none (NVIDIA/Megatron-LM@d98e8a6,
    /// transformer_config.py: "Delayed scaling does not support moe_act and layernorm recompute").
    #[must_use]
    pub fn cannot_recompute(self, selection: Selection) -> Option<Selection> {
        let parts = [RecomputeModule::Norms, RecomputeModule::ExpertActivation];
        let parts = selection.and(parts.into_iter().collect());
        Some(parts).filter(|parts| self == Self::Delayed && *parts != Selection::default())
    }
}
