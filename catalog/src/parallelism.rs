//! The words in which runtimes bound strategies and strategies are written: axes, ZeRO levels,
//! context-parallel kinds, schedules, overlap. What a strategy *is* lives in `plans`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{EnumCount, IntoStaticStr, VariantArray};

/// A mesh axis. The dense mesh is `pp · dp_replicate · dp_shard · cp · tp`; experts use
/// `pp · edp · ep · etp` over the same ranks.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Axis {
    /// Tensor parallel (and sequence parallel, on the same ranks).
    Tp,
    /// Context parallel.
    Cp,
    /// Expert parallel.
    Ep,
    /// Tensor parallel inside an expert.
    Etp,
    /// Replicas of one expert shard: world / (pp · ep · etp).
    Edp,
    /// Data parallel with sharded states.
    DpShard,
    /// Data parallel with replicated states.
    DpReplicate,
    /// Pipeline parallel.
    Pp,
}

/// Order of the dense mesh axes, innermost (neighbouring ranks) first.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct AxisOrder(pub [Axis; 5]);

impl AxisOrder {
    /// Megatron's default `tp-cp-ep-dp-pp`, also torchtitan's.
    pub const TP_CP_DP_PP: Self = Self([
        Axis::Tp,
        Axis::Cp,
        Axis::DpShard,
        Axis::DpReplicate,
        Axis::Pp,
    ]);
    /// Megatron's `--use-tp-pp-dp-mapping`: pipeline neighbours before data-parallel ones.
    pub const TP_CP_PP_DP: Self = Self([
        Axis::Tp,
        Axis::Cp,
        Axis::Pp,
        Axis::DpShard,
        Axis::DpReplicate,
    ]);
}

/// A pipeline schedule.
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
    EnumCount,
)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward (PipeDream-flush).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// Interleaved virtual stages (Narayanan et al. 2021).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Zero bubble with 1F1B memory (Qi et al. 2023, ZB-H1).
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// Zero bubble in a V of two chunks (Qi et al. 2024).
    #[serde(rename = "zb-v")]
    ZbV,
    /// DualPipe cut in half to a V (DeepSeek-V3, "cut-in-half").
    #[serde(rename = "dualpipe-v")]
    DualPipeV,
}

/// How attention communicates when the sequence is sharded.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum CpKind {
    /// Ring attention: KV blocks travel point to point, overlapped with attention.
    Ring,
    /// KV all-gathered before attention (Llama 3).
    AllGather,
    /// All-to-all that exchanges sequence shards for head shards (DeepSpeed-Ulysses).
    AllToAll,
}

/// ZeRO stage.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(into = "u8", try_from = "u8")]
#[schemars(with = "u8", extend("enum" = [0, 1, 2, 3]))]
pub enum Zero {
    /// DDP: everything replicated.
    Z0,
    /// Optimizer states sharded.
    Z1,
    /// Optimizer states and gradients sharded.
    Z2,
    /// Optimizer states, gradients and parameters sharded (FSDP).
    Z3,
}

/// Which communication overlaps with computation, where the runtime allows.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct Overlap {
    /// Gradient reduction overlaps with backward.
    pub grad_reduce: bool,
    /// Parameter all-gather (ZeRO-1 after the step, ZeRO-3 prefetch) overlaps with passes.
    pub param_gather: bool,
    /// Tensor-parallel collectives are chunked and overlap with their matrix products.
    pub tensor_parallel: bool,
    /// Pipeline sends and receives overlap with compute.
    pub pipeline: bool,
    /// Messages to and from experts overlap with the passes of another micro-batch.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub expert_parallel: bool,
}

impl Overlap {
    /// Everything overlaps.
    pub const ALL: Self = Self {
        grad_reduce: true,
        param_gather: true,
        tensor_parallel: true,
        pipeline: true,
        expert_parallel: true,
    };
    /// Nothing overlaps.
    pub const NONE: Self = Self {
        grad_reduce: false,
        param_gather: false,
        tensor_parallel: false,
        pipeline: false,
        expert_parallel: false,
    };
}

impl From<Zero> for u8 {
    fn from(zero: Zero) -> u8 {
        match zero {
            Zero::Z0 => 0,
            Zero::Z1 => 1,
            Zero::Z2 => 2,
            Zero::Z3 => 3,
        }
    }
}

impl TryFrom<u8> for Zero {
    type Error = String;
    fn try_from(level: u8) -> Result<Self, String> {
        match level {
            0 => Ok(Zero::Z0),
            1 => Ok(Zero::Z1),
            2 => Ok(Zero::Z2),
            3 => Ok(Zero::Z3),
            other => Err(format!("zero is 0, 1, 2 or 3, not {other}")),
        }
    }
}

impl ScheduleKind {
    /// Every schedule.
    pub const ALL: [Self; Self::COUNT] = [
        Self::OneFOneB,
        Self::Interleaved,
        Self::GPipe,
        Self::ZbH1,
        Self::ZbV,
        Self::DualPipeV,
    ];

    /// Whether the schedule splits backward passes in two: gradients of inputs first, gradients of weights later.
    #[must_use]
    pub fn splits_backward(self) -> bool {
        match self {
            Self::GPipe | Self::OneFOneB | Self::Interleaved => false,
            Self::ZbH1 | Self::ZbV | Self::DualPipeV => true,
        }
    }

    /// 1F1B with that many virtual stages per rank: interleaved if they are several.
    #[must_use]
    pub fn one_f_one_b(vpp: u64) -> Self {
        if vpp > 1 {
            Self::Interleaved
        } else {
            Self::OneFOneB
        }
    }

    /// The name used in files, flags and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZbH1 => "zb-h1",
            Self::ZbV => "zb-v",
            Self::DualPipeV => "dualpipe-v",
        }
    }
}

impl std::fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl CpKind {
    /// Every kind.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The name used in files, flags and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl Axis {
    /// The name used in files, flags and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}
