//! The parts of a layer that selective recomputation may run again, and sets of them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

use crate::model::{AttentionKind, ModelConfig};

/// A part of a layer that selective recomputation runs again (Megatron-Core `--recompute-modules`).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    IntoStaticStr,
    EnumString,
    VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum RecomputeModule {
    /// Core attention (`core_attn`).
    CoreAttention,
    /// The norms before latent attention and before experts (`layernorm`).
    Norms,
    /// The projections from latents to queries, keys and values, with their rotary embedding (`mla_up_proj`).
    LatentProjections,
    /// The nonlinearity of experts (`moe_act`).
    ExpertActivation,
    /// The whole feed-forward part of a dense layer (`mlp`).
    Mlp,
}

impl RecomputeModule {
    /// Every part.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name in strategies.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Its name in Megatron-LM's options.
    #[must_use]
    pub fn megatron_name(self) -> &'static str {
        match self {
            Self::CoreAttention => "core_attn",
            Self::Norms => "layernorm",
            Self::LatentProjections => "mla_up_proj",
            Self::ExpertActivation => "moe_act",
            Self::Mlp => "mlp",
        }
    }

    /// The part with this name in Megatron-LM's options.
    #[must_use]
    pub fn of_megatron(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|module| module.megatron_name() == name)
    }

    /// Whether a model has such a part. Norms are parts by themselves only before latent attention and before experts; others are in
    /// the linear layer that follows (NVIDIA/Megatron-LM@d98e8a6, `core/models/gpt/gpt_layer_specs.py`).
    fn is_in(self, model: &ModelConfig) -> bool {
        let dense = model
            .moe
            .is_none_or(|moe| moe.first_dense > 0 || moe.every > 1);
        let latent = matches!(model.attention.kind, AttentionKind::Latent { .. });
        match self {
            Self::CoreAttention => true,
            Self::Norms => latent || model.moe.is_some(),
            Self::LatentProjections => latent,
            Self::ExpertActivation => model.moe.is_some(),
            Self::Mlp => dense,
        }
    }
}

/// A set of parts for selective recomputation.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(from = "Vec<RecomputeModule>", into = "Vec<RecomputeModule>")]
pub struct Selection(u8);

impl Selection {
    /// Whether a part is in the set.
    #[must_use]
    pub fn contains(self, module: RecomputeModule) -> bool {
        self.0 & bit(module) != 0
    }

    /// The parts, in their usual order.
    pub fn modules(self) -> impl Iterator<Item = RecomputeModule> {
        let all = RecomputeModule::ALL.iter().copied();
        all.filter(move |module| self.contains(*module))
    }

    /// The parts in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The parts of the set that a model has.
    #[must_use]
    pub fn of_model(self, model: &ModelConfig) -> Self {
        self.modules().filter(|part| part.is_in(model)).collect()
    }

    /// Whether the set has no part.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// As in strategies: `norms+mlp`.
    #[must_use]
    pub fn name(self) -> String {
        let names = self.modules().map(RecomputeModule::name);
        names.collect::<Vec<&str>>().join("+")
    }

    /// Reads what [`Selection::name`] writes.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        text.split('+').map(|name| name.parse().ok()).collect()
    }
}

impl FromIterator<RecomputeModule> for Selection {
    fn from_iter<T: IntoIterator<Item = RecomputeModule>>(modules: T) -> Self {
        Self(modules.into_iter().fold(0, |set, module| set | bit(module)))
    }
}

impl From<Vec<RecomputeModule>> for Selection {
    fn from(modules: Vec<RecomputeModule>) -> Self {
        modules.into_iter().collect()
    }
}

impl From<Selection> for Vec<RecomputeModule> {
    fn from(selection: Selection) -> Self {
        selection.modules().collect()
    }
}

fn bit(module: RecomputeModule) -> u8 {
    1 << module as u8
}
