//! Element types of parameters, gradients and optimizer states: the runtime's defaults, and the alternatives that it can be
//! told to use.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

use crate::dtype::{DType, Precision};
use crate::parallelism::Zero;

/// Element types of parameters, gradients and optimizer states, which stay in memory for the whole step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StateTypes {
    /// Type of the copy that kernels read; `None` for the training precision's.
    pub parameter: Option<DType>,
    /// Type of the optimizer's master copy: 32 bits, or the 16 that a 16-bit parameter lacks.
    pub master: Option<DType>,
    /// Type of the buffer in which gradients accumulate; `None` for the training precision's.
    pub gradient: Option<DType>,
    /// Type in which gradients are reduced. `bf16` stands for 16 bits: jobs in fp16 reduce in fp16.
    pub reduce: DType,
    /// Type of Adam's first moment.
    pub momentum: DType,
    /// Type of Adam's second moment.
    pub variance: DType,
    /// Type of a 16-bit gradient copy that is kept beside the accumulation buffer until reduced.
    pub extra_gradient: Option<DType>,
}

impl StateTypes {
    /// The same types, except for those of gradients.
    #[must_use]
    pub fn with_gradients(self, gradients: GradientTypes) -> Self {
        Self {
            gradient: Some(gradients.held),
            reduce: gradients.reduced,
            ..self
        }
    }
}

/// Number of weights whose 8-bit moments share a scale.
const SCALED_BLOCK: u64 = 256;

/// Element types of gradients in a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GradientTypes {
    /// Type of the buffer in which the gradients of all micro-batches are added up.
    pub held: DType,
    /// Type in which data-parallel ranks reduce them.
    pub reduced: DType,
}

/// Element types of gradients that a runtime can be told to use instead of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GradientOption {
    /// Type of the buffer in which gradients accumulate; `None` for the training precision's.
    pub held: Option<DType>,
    /// Type in which gradients are reduced; `None` for the training precision's.
    pub reduced: Option<DType>,
    /// Whether the optimizer step copies the gradients that a rank updates with to 32 bits.
    #[serde(default)]
    pub copied_for_step: bool,
    /// Smallest ZeRO level at which it works; 0 if absent.
    #[serde(default = "unsharded")]
    pub from_zero: Zero,
}

fn unsharded() -> Zero {
    Zero::Z0
}

/// A way to store optimizer states in fewer bytes than as 32-bit master weights and moments.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum OptimizerStates {
    /// Master weights keep only the 16 bits that the bf16 parameter lacks; moments have 32 bits. Results do not change
    /// (`store_param_remainders` of Transformer Engine's Adam).
    SplitMaster,
    /// Both moments in bf16; in bf16 jobs, master weights as in `SplitMaster`. Jobs in 8 bits keep them whole
    /// (`use_precision_aware_optimizer_no_fp8_or_ds_fp8` in Megatron-LM's `optimizer_config.py`; assumed for delayed scaling too).
    Bf16Moments,
    /// Both moments in 8 bits with a 32-bit scale per 256 (bitsandbytes' AdamW in Hugging Face's Trainer, with which the embedding table's
    /// keep 32 bits; under FSDP2 torchao's).
    #[serde(rename = "8bit_moments")]
    #[strum(serialize = "8bit_moments")]
    EightBitMoments,
}

impl OptimizerStates {
    /// Every variant, the one with the largest states first.
    pub const ALL: &'static [Self] = Self::VARIANTS;
    /// The word in constraints for the runtime's default.
    pub const OWN: &str = "own";

    /// Its name in `--strategy` and plan files.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// State types of a job that stores optimizer states this way; `own` are the runtime's.
    #[must_use]
    pub fn of(self, own: StateTypes, precision: Precision) -> StateTypes {
        let master = match precision {
            Precision::Bf16 if self.completes_parameters() => Some(DType::Bf16),
            _ => own.master,
        };
        let moments = match self {
            Self::SplitMaster => DType::F32,
            Self::Bf16Moments => DType::Bf16,
            Self::EightBitMoments => DType::U8,
        };
        StateTypes {
            master,
            momentum: moments,
            variance: moments,
            ..own
        }
    }

    /// Whether master weights of bf16 jobs hold only the bits that the bf16 parameters lack.
    #[must_use]
    pub fn completes_parameters(self) -> bool {
        match self {
            Self::SplitMaster | Self::Bf16Moments => true,
            Self::EightBitMoments => false,
        }
    }

    /// Whether training with it gives other results than with 32-bit states.
    #[must_use]
    pub fn changes_results(self) -> bool {
        match self {
            Self::SplitMaster => false,
            Self::Bf16Moments | Self::EightBitMoments => true,
        }
    }
}

impl StateTypes {
    /// Bytes of both moments of `elements` weights, with the scales of 8-bit moments.
    #[must_use]
    pub fn moments(&self, elements: u64) -> u64 {
        let of = |dtype: DType| match dtype {
            DType::U8 => elements + elements.div_ceil(SCALED_BLOCK) * DType::F32.size(),
            _ => elements * dtype.size(),
        };
        of(self.momentum) + of(self.variance)
    }

    /// Bytes that the moments of `elements` weights of an embedding table need beyond
    /// [`StateTypes::moments`]: they have 32 bits where other moments have 8.
    #[must_use]
    pub fn wider_moments(&self, elements: u64) -> u64 {
        match self.momentum {
            DType::U8 => (2 * DType::F32.size() * elements).saturating_sub(self.moments(elements)),
            _ => 0,
        }
    }
}

impl GradientTypes {
    /// The same type for holding and reducing.
    #[must_use]
    pub fn all(dtype: DType) -> Self {
        Self {
            held: dtype,
            reduced: dtype,
        }
    }

    /// As in strategies: `bf16`, or `fp32/bf16` where gradients are held in another type than they are reduced in.
    #[must_use]
    pub fn name(self) -> String {
        match self.held == self.reduced {
            true => name(self.held).to_owned(),
            false => format!("{}/{}", name(self.held), name(self.reduced)),
        }
    }

    /// Reads what [`GradientTypes::name`] writes.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let (held, reduced) = text.split_once('/').unwrap_or((text, text));
        Some(Self {
            held: float(held)?,
            reduced: float(reduced)?,
        })
    }

    /// The smaller type of the two, for holding and for reducing.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        let smaller = |a: DType, b: DType| if b.size() < a.size() { b } else { a };
        Self {
            held: smaller(self.held, other.held),
            reduced: smaller(self.reduced, other.reduced),
        }
    }
}

impl GradientOption {
    /// The types in a job of that precision.
    pub(crate) fn types(self, precision: Precision) -> GradientTypes {
        GradientTypes {
            held: self.held.unwrap_or(precision.activation()),
            reduced: self.reduced.unwrap_or(precision.activation()),
        }
    }
}

/// A type of floating-point numbers as it is written in strategies.
fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "fp32",
        DType::Bf16 => "bf16",
        DType::F16 => "fp16",
        DType::F8 => "fp8",
        DType::I64 => "int64",
        DType::I32 => "int32",
        DType::U8 => "uint8",
    }
}

fn float(text: &str) -> Option<DType> {
    let all = [DType::F32, DType::Bf16, DType::F16];
    all.into_iter().find(|&dtype| name(dtype) == text)
}
