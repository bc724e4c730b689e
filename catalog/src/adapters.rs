//! Low-rank adapters (LoRA, Hu et al. 2021): all weights of a model are frozen, and beside some linear layers two
//! narrow ones are trained, `y = W·x + (alpha/rank) · B·A·x` with `A: [rank, in]` and `B: [out, rank]`.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

/// The adapters that are trained beside a model's frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Adapters {
    /// Rows of `A` and columns of `B`: PEFT's `r`, Megatron-Bridge's `dim`.
    pub rank: u64,
    /// The adapter's result is multiplied by `alpha / rank`.
    pub alpha: u64,
    /// The kinds of linear layers that have an adapter.
    pub modules: AdaptedModules,
    /// Probability that an element of the adapter's input is zeroed; 0 means the operator is absent.
    #[serde(default)]
    pub dropout: f64,
}

/// A kind of linear layer that may have an adapter.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum AdaptedModule {
    /// The linear layer that makes queries.
    Q,
    /// The linear layer that makes keys.
    K,
    /// The linear layer that makes values.
    V,
    /// The output projection of attention.
    Proj,
    /// The first linear layers of a feed-forward block: its gate and up projections.
    Fc1,
    /// The last linear layer of a feed-forward block: its down projection.
    Fc2,
}

impl AdaptedModule {
    /// Every kind.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name in `--lora modules=…`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A set of kinds of linear layers.
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
#[serde(from = "Vec<AdaptedModule>", into = "Vec<AdaptedModule>")]
pub struct AdaptedModules(u8);

impl AdaptedModules {
    /// Every linear layer of attention and feed-forward blocks.
    #[must_use]
    pub fn all() -> Self {
        AdaptedModule::ALL.iter().copied().collect()
    }

    /// Whether layers of this kind have an adapter.
    #[must_use]
    pub fn contains(self, module: AdaptedModule) -> bool {
        self.0 & bit(module) != 0
    }

    /// Whether all layers of these kinds have an adapter.
    #[must_use]
    pub fn contains_all(self, modules: &[AdaptedModule]) -> bool {
        modules.iter().all(|&module| self.contains(module))
    }

    /// The kinds, in their usual order.
    pub fn modules(self) -> impl Iterator<Item = AdaptedModule> {
        let all = AdaptedModule::ALL.iter().copied();
        all.filter(move |module| self.contains(*module))
    }

    /// Kinds that a name denotes: ours, in PEFT's `target_modules` for Llama, or Megatron-Bridge's.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        use AdaptedModule::{Fc1, Fc2, K, Proj, Q, V};
        let modules: &[AdaptedModule] = match name {
            "q" | "q_proj" => &[Q],
            "k" | "k_proj" => &[K],
            "v" | "v_proj" => &[V],
            "qkv" | "linear_qkv" | "qkv_proj" => &[Q, K, V],
            "proj" | "o_proj" | "linear_proj" => &[Proj],
            "fc1" | "linear_fc1" | "gate_up_proj" => &[Fc1],
            "fc2" | "down_proj" | "linear_fc2" => &[Fc2],
            "attention" => &[Q, K, V, Proj],
            "mlp" => &[Fc1, Fc2],
            "all" => AdaptedModule::ALL,
            _ => return None,
        };
        Some(modules.iter().copied().collect())
    }
}

impl FromIterator<AdaptedModule> for AdaptedModules {
    fn from_iter<T: IntoIterator<Item = AdaptedModule>>(modules: T) -> Self {
        Self(modules.into_iter().fold(0, |set, m| set | bit(m)))
    }
}

impl From<Vec<AdaptedModule>> for AdaptedModules {
    fn from(modules: Vec<AdaptedModule>) -> Self {
        modules.into_iter().collect()
    }
}

impl From<AdaptedModules> for Vec<AdaptedModule> {
    fn from(modules: AdaptedModules) -> Self {
        modules.modules().collect()
    }
}

fn bit(module: AdaptedModule) -> u8 {
    1 << module as u8
}

impl fmt::Display for Adapters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.modules.modules().map(AdaptedModule::name).collect();
        let modules = names.join("+");
        write!(
            f,
            "rank={},alpha={},modules={modules}",
            self.rank, self.alpha
        )?;
        match self.dropout {
            0.0 => Ok(()),
            dropout => write!(f, ",dropout={dropout}"),
        }
    }
}

impl std::str::FromStr for Adapters {
    type Err = String;

    /// Reads `rank=16,alpha=32,modules=qkv+proj,dropout=0.05`. Without `alpha` it is twice the rank, as in
    /// LLaMA-Factory; without `modules` every linear layer of attention and feed-forward blocks has an adapter.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut read = Self {
            rank: 0,
            alpha: 0,
            modules: AdaptedModules::all(),
            dropout: 0.0,
        };
        let mut alpha = None;
        let mut keys = Vec::new();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let (key, value) = (key.trim(), value.trim());
            let wrong = |expected: &str| format!("`{part}`: expected {expected}");
            if keys.contains(&key) {
                return Err(format!("`{part}`: expected {key} once"));
            }
            keys.push(key);
            match key {
                "rank" => {
                    read.rank = value.parse().map_err(|_| wrong("a whole number"))?;
                }
                "alpha" => {
                    let read_alpha: u64 = value.parse().map_err(|_| wrong("a whole number"))?;
                    alpha = Some(read_alpha);
                }
                "dropout" => read.dropout = value.parse().map_err(|_| wrong("a number"))?,
                "modules" => {
                    let sets = value.split('+').map(AdaptedModules::named);
                    let sets: Option<Vec<_>> = sets.collect();
                    let sets = sets.ok_or_else(|| {
                        wrong("q, k, v, proj, fc1, fc2, qkv, attention, mlp or all, joined by +")
                    })?;
                    read.modules = sets.into_iter().flat_map(AdaptedModules::modules).collect();
                }
                _ => return Err(wrong("rank, alpha, modules or dropout")),
            }
        }
        read.alpha = alpha.unwrap_or(read.rank.saturating_mul(2));
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for (text, written) in [
            ("rank=16", "rank=16,alpha=32,modules=q+k+v+proj+fc1+fc2"),
            (
                "rank=8,alpha=16,modules=q_proj+v_proj,dropout=0.05",
                "rank=8,alpha=16,modules=q+v,dropout=0.05",
            ),
            (
                "rank=4,alpha=1,modules=mlp+linear_qkv",
                "rank=4,alpha=1,modules=q+k+v+fc1+fc2",
            ),
        ] {
            let adapters: Adapters = text.parse().expect(text);
            assert_eq!(adapters.to_string(), written);
            assert_eq!(written.parse(), Ok(adapters));
        }
        for wrong in [
            "rank",
            "rank=x",
            "modules=gate",
            "r=3",
            "rank=16,rank=8",
            "rank=16,alpha=8, alpha=8",
            "rank=16,modules=qkv,modules=proj",
        ] {
            let error = wrong.parse::<Adapters>().expect_err(wrong);
            assert!(error.contains("expected"), "{error}");
        }
    }
}
