//! Flags that several commands have.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// What is planned for.
#[derive(Args, Debug, Clone)]
pub(crate) struct ScenarioArgs {
    /// Model preset, config.json, or folder of a downloaded checkpoint
    #[arg(long)]
    pub(crate) model: String,
    /// Cluster preset, YAML file, or profile; `local` is this machine as `profile` measured it
    #[arg(long, default_value = "dgx-h100")]
    pub(crate) cluster: String,
    /// Number of GPUs (on a profiled machine: of ranks)
    #[arg(long)]
    pub(crate) gpus: u64,
    /// Training system that will run the plan [default: megatron-core; vescale on a profiled
    /// machine]
    #[arg(long)]
    pub(crate) runtime: Option<String>,
    /// Tokens per sequence
    #[arg(long, default_value_t = 8192)]
    pub(crate) seq: u64,
    /// Sequences per optimizer step [default: 4 Mi tokens, at least 2 sequences per GPU pair]
    #[arg(long)]
    pub(crate) global_batch: Option<u64>,
    /// Precision of linear layers
    #[arg(long, value_enum, default_value_t = PrecisionArg::Bf16)]
    pub(crate) precision: PrecisionArg,
    /// Share of device memory to leave free
    #[arg(long, default_value_t = 0.05)]
    pub(crate) headroom: f64,
}

/// Precision flag.
#[derive(ValueEnum, Debug, Clone, Copy)]
pub(crate) enum PrecisionArg {
    /// Products on TF32 units where the device has them, elsewhere on 32-bit units
    Fp32,
    Fp16,
    Bf16,
    Fp8,
}

/// How to print.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct OutputArgs {
    /// One JSON document on stdout
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress or notes on stderr
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Money and time of a whole training.
#[derive(Args, Debug, Clone)]
pub(crate) struct BudgetArgs {
    /// Tokens to train on, such as 15T or 300B
    #[arg(long)]
    pub(crate) tokens: Option<String>,
    /// Dollars per GPU and hour [default: the cluster's]
    #[arg(long)]
    pub(crate) price: Option<f64>,
}

/// What the search may choose.
#[derive(Args, Debug, Clone, Default)]
pub(crate) struct ConstraintArgs {
    /// Fix dimensions: tp=8,zero=1,schedule=1f1b|interleaved
    #[arg(long)]
    pub(crate) fix: Vec<String>,
    /// Lower bounds: pp=2
    #[arg(long)]
    pub(crate) min: Vec<String>,
    /// Upper bounds: pp=4
    #[arg(long)]
    pub(crate) max: Vec<String>,
    /// Dimensions not to use: cp
    #[arg(long)]
    pub(crate) forbid: Vec<String>,
    /// Constraints from a YAML file
    #[arg(long)]
    pub(crate) constraints: Option<PathBuf>,
}
