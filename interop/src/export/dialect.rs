//! The training systems whose configurations are read and written, each at a stated version.

use catalog::Precision;
use strum::VariantArray;

use super::refusal::ExportError;

/// A training system's configuration format at a stated version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, VariantArray)]
pub enum Dialect {
    /// Megatron-LM command line, core 0.20.
    MegatronLm,
    /// Megatron Bridge, main of 2026-08.
    MegatronBridge,
    /// torchtitan 0.3, Python.
    Torchtitan03,
    /// torchtitan 0.2, TOML.
    Torchtitan02,
    /// torchtitan main of 2026-08, Python, batch in tokens.
    TorchtitanMain,
    /// DeepSpeed 0.19, JSON.
    DeepSpeed,
    /// accelerate 1.15 with FSDP2, YAML.
    Accelerate,
    /// axolotl 0.19, YAML.
    Axolotl,
    /// Hugging Face's Trainer with FSDP2, transformers 5.23, JSON.
    Transformers,
    /// Hugging Face's Trainer with DeepSpeed, transformers 5.23, JSON.
    TransformersDeepSpeed,
    /// LLaMA-Factory main of 2026-08 with DeepSpeed, YAML.
    LlamaFactory,
    /// nanotron main of 2026-04, YAML.
    Nanotron,
    /// veScale's sharding plan (legacy API), Python.
    VeScale,
}

impl Dialect {
    /// Whether its files are Python.
    pub(crate) fn is_python(self) -> bool {
        matches!(
            self,
            Self::MegatronBridge | Self::Torchtitan03 | Self::TorchtitanMain | Self::VeScale
        )
    }

    /// Whether its files say which adapters are trained.
    pub(crate) fn writes_adapters(self) -> bool {
        matches!(self, Self::Axolotl | Self::LlamaFactory)
    }

    /// Whether a training script of the user's own loads the model, by its name on the hub.
    pub(crate) fn loads_in_script(self) -> bool {
        self.names_the_model() && !self.writes_adapters()
    }

    /// Whether Transformers builds the model by its name, not from a description in the files.
    pub(crate) fn names_the_model(self) -> bool {
        match self {
            Self::DeepSpeed
            | Self::Accelerate
            | Self::Axolotl
            | Self::Transformers
            | Self::TransformersDeepSpeed
            | Self::LlamaFactory => true,
            Self::MegatronLm
            | Self::MegatronBridge
            | Self::Torchtitan03
            | Self::Torchtitan02
            | Self::TorchtitanMain
            | Self::Nanotron
            | Self::VeScale => false,
        }
    }

    /// Every dialect; the first of a target is its default version.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Name and version of the training system, and the runtime whose search space is closest to what it can express.
    fn names(self) -> [&'static str; 3] {
        match self {
            Self::MegatronLm => ["megatron-lm", "0.20", "megatron-core"],
            Self::MegatronBridge => ["megatron-bridge", "main", "megatron-core"],
            Self::Torchtitan02 => ["torchtitan", "0.2", "torchtitan"],
            Self::Torchtitan03 => ["torchtitan", "0.3", "torchtitan-2026"],
            Self::TorchtitanMain => ["torchtitan", "main", "torchtitan-2026"],
            Self::DeepSpeed => ["deepspeed", "0.19", "deepspeed"],
            Self::Accelerate => ["accelerate", "1.15", "fsdp2"],
            Self::Axolotl => ["axolotl", "0.19", "fsdp2"],
            Self::Transformers => ["transformers", "5.23", "hf-trainer"],
            Self::TransformersDeepSpeed => ["transformers-deepspeed", "5.23", "hf-deepspeed"],
            Self::LlamaFactory => ["llama-factory", "main", "hf-deepspeed"],
            Self::Nanotron => ["nanotron", "main", "nanotron"],
            Self::VeScale => ["vescale", "legacy", "vescale"],
        }
    }

    /// Name of the training system.
    #[must_use]
    pub fn target(self) -> &'static str {
        self.names()[0]
    }

    /// Version of the training system.
    #[must_use]
    pub fn version(self) -> &'static str {
        self.names()[1]
    }

    /// Name and version as `target@version`.
    #[must_use]
    pub fn name(self) -> String {
        format!("{}@{}", self.target(), self.version())
    }

    /// Whether its files give the tokens per sequence.
    #[must_use]
    pub fn has_sequence_length(self) -> bool {
        !matches!(self, Self::DeepSpeed | Self::Accelerate)
    }

    /// Whether its files give the sequences per micro-batch.
    #[must_use]
    pub fn has_micro_batch(self) -> bool {
        self != Self::Accelerate
    }

    /// The runtime whose search space is closest to what this target can express.
    #[must_use]
    pub fn runtime(self) -> &'static str {
        self.names()[2]
    }

    /// Constraints of `search --fix` that keep a search in a precision within what this target can express.
    #[must_use]
    pub fn limits(self, precision: Precision) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::MegatronLm
            | Self::MegatronBridge
            | Self::DeepSpeed
            | Self::TransformersDeepSpeed
            | Self::LlamaFactory => &[],
            Self::Accelerate | Self::Axolotl => &[("zero", "0|3"), ("prefetch", "1")],
            Self::Transformers => &[("zero", "0|3"), ("dp_replicate", "1")],
            Self::Torchtitan03 | Self::TorchtitanMain if precision == Precision::Fp8 => {
                &[("cp_kind", "all_gather"), ("fp8_recipe", "rowwise")]
            }
            Self::Torchtitan02 | Self::Torchtitan03 | Self::TorchtitanMain => {
                &[("cp_kind", "all_gather")]
            }
            Self::Nanotron => &[("schedule", "1f1b"), ("recompute", "none|full")],
            Self::VeScale => &[
                ("cp", "1"),
                ("ep", "1"),
                ("etp", "1"),
                ("zero", "0|1"),
                ("recompute", "none"),
                ("schedule", "1f1b|interleaved|gpipe|zb-h1"),
            ],
        }
    }

    /// Parses `target` or `target@version`.
    ///
    /// # Errors
    /// For an unknown target or version; the error lists the known ones.
    pub fn parse(text: &str) -> Result<Self, ExportError> {
        let (target, version) = match text.split_once('@') {
            Some((target, version)) => (target, Some(version)),
            None => (text, None),
        };
        let mut of_target = Self::ALL.iter().filter(|d| d.target() == target);
        let found = match version {
            None => of_target.next(),
            Some(version) => of_target.find(|d| d.version() == version),
        };
        if let Some(found) = found {
            return Ok(*found);
        }
        let known: Vec<&str> = Self::ALL
            .iter()
            .filter(|d| d.target() == target)
            .map(|d| d.version())
            .collect();
        if !known.is_empty() {
            return Err(ExportError::UnknownVersion {
                target: target.to_owned(),
                asked: version.unwrap_or_default().to_owned(),
                known: known.join(", "),
            });
        }
        let mut targets: Vec<&str> = Self::ALL.iter().map(|d| d.target()).collect();
        targets.dedup();
        let nearest = catalog::suggest::nearest(target, &targets);
        Err(ExportError::UnknownTarget {
            asked: target.chars().take(80).collect(),
            nearest,
            known: targets.join(", "),
        })
    }
}
