//! Element types and training precisions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantArray};

/// Type of a tensor's elements.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit float.
    F32,
    /// Brain float, 16 bits.
    Bf16,
    /// IEEE half precision.
    F16,
    /// 8-bit float, e4m3 or e5m2.
    F8,
    /// 64-bit integer.
    I64,
    /// 32-bit integer.
    I32,
    /// 8-bit unsigned integer or boolean: dropout masks.
    U8,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::F8 | DType::U8 => 1,
        }
    }
}

/// The type in which linear layers compute. The runtime decides the types of states.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[derive(EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats. Products run on TF32 matrix units where the device has them, as after PyTorch's
    /// `torch.set_float32_matmul_precision("high")`, which is not its default; elsewhere on 32-bit units.
    Fp32,
    /// IEEE half precision.
    Fp16,
    /// Brain float.
    Bf16,
    /// 8-bit matrix products, bf16 elsewhere.
    Fp8,
}

impl Precision {
    /// All precisions.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name, as `--precision` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Element type of activations.
    #[must_use]
    pub fn activation(self) -> DType {
        match self {
            Precision::Fp32 => DType::F32,
            Precision::Fp16 => DType::F16,
            Precision::Bf16 | Precision::Fp8 => DType::Bf16,
        }
    }

    /// Element type of matrix-product operands.
    #[must_use]
    pub fn matmul(self) -> DType {
        match self {
            Precision::Fp8 => DType::F8,
            Precision::Fp32 | Precision::Fp16 | Precision::Bf16 => self.activation(),
        }
    }
}
