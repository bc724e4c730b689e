//! The parts of a layer that selective recomputation may run again, and sets of them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{AttentionKind, ModelConfig};

/// A part of a layer that selective recomputation runs again (Megatron-Core `--recompute-modules`).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeModule {
    /// Core attention (`core_attn`).
    CoreAttention,
    /// The norms before attention and feed-forward (`layernorm`).
    Norms,
    /// The projections from latents to queries, keys and values, with their rotary embedding (`mla_up_proj`).
    LatentProjections,
    /// The nonlinearity of experts (`moe_act`).
    ExpertActivation,
    /// The whole feed-forward part of a dense layer (`mlp`).
    Mlp,
}

impl RecomputeModule {
    /// Every part, with its name in strategies and its name in Megatron-LM's options.
    pub const ALL: [(Self, &str, &str); 5] = [
        (Self::CoreAttention, "core_attention", "core_attn"),
        (Self::Norms, "norms", "layernorm"),
        (Self::LatentProjections, "latent_projections", "mla_up_proj"),
        (Self::ExpertActivation, "expert_activation", "moe_act"),
        (Self::Mlp, "mlp", "mlp"),
    ];

    /// The part that Megatron-LM calls so.
    #[must_use]
    pub fn of_megatron(name: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(_, _, theirs)| *theirs == name);
        found.map(|(module, ..)| *module)
    }

    /// Whether a model has such a part.
    pub(crate) fn is_in(self, model: &ModelConfig) -> bool {
        let dense = model
            .moe
            .is_none_or(|moe| moe.first_dense > 0 || moe.every > 1 || moe.shared_ffn > 0);
        match self {
            Self::CoreAttention | Self::Norms => true,
            Self::LatentProjections => matches!(model.attention.kind, AttentionKind::Latent { .. }),
            Self::ExpertActivation => model.moe.is_some(),
            Self::Mlp => dense,
        }
    }
}

/// A set of such parts.
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
        let all = RecomputeModule::ALL.into_iter().map(|(module, ..)| module);
        all.filter(move |module| self.contains(*module))
    }

    /// The parts in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// As in strategies: `norms+mlp`.
    #[must_use]
    pub fn name(self) -> String {
        let all = RecomputeModule::ALL.into_iter();
        let names = all.filter_map(|(module, name, _)| self.contains(module).then_some(name));
        names.collect::<Vec<&str>>().join("+")
    }

    /// Reads what [`Selection::name`] writes.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let module = |text: &str| {
            let found = RecomputeModule::ALL
                .iter()
                .find(|(_, name, _)| *name == text);
            found.map(|(module, ..)| *module)
        };
        text.split('+').map(module).collect()
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
