//! Flags that several commands have.

use std::path::PathBuf;

use answers::failures::{self, Checkpoint, Mtbf};
use answers::values::{self, Gpus};
use catalog::{Adapters, Lengths, Seconds};
use clap::{Args, ValueEnum};

/// The job to plan.
#[derive(Args, Debug, Clone)]
pub(crate) struct ScenarioArgs {
    /// Model preset, config.json, or folder of a downloaded checkpoint
    #[arg(long, required = true)]
    pub(crate) model: Option<String>,
    /// Cluster preset, YAML file, one line such as 'h100-sxm x 8 per node, 400 Gb/s x 8', pools such as
    /// '64 x dgx-a100 + 32 x dgx2-v100', or profile; `local`
    /// is this machine as `profile` measured it [default: dgx-h100]
    #[arg(long)]
    pub(crate) cluster: Option<String>,
    /// Number of GPUs, '64 nodes', or '512x h100' (number of ranks on a profiled machine)
    #[arg(long, required = true, value_parser = values::gpus, allow_hyphen_values = true)]
    pub(crate) gpus: Option<Gpus>,
    /// Training system that will run the plan [default: megatron-core; vescale on a profiled
    /// machine]
    #[arg(long)]
    pub(crate) runtime: Option<String>,
    /// Tokens per sequence; 8k is 8192 [default: 8192, or fewer if the model's learned table of positions is shorter]
    #[arg(long, value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) seq: Option<u64>,
    /// Sequences per optimizer step [default: as many as make 4 Mi tokens, and at least one for
    /// each of up to 2048 GPUs]
    #[arg(long, value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) global_batch: Option<u64>,
    #[command(flatten)]
    pub(crate) assumed: AssumedArgs,
}

/// What is assumed of a job beside its sizes: what sequences are made of, which weights are trained and how, what is left free,
/// and how much ranks differ.
#[derive(Args, Debug, Clone)]
pub(crate) struct AssumedArgs {
    /// Lengths of the documents that sequences are made of: 512:0.7,4k:0.3, lognormal:mean=1k,sigma=0.9, or a file with a
    /// length and a number of documents on each line [default: each sequence is one document]
    #[arg(long, value_parser = values::lengths, allow_hyphen_values = true, value_name = "LENGTHS|FILE")]
    pub(crate) lengths: Option<Lengths>,
    /// How documents become sequences [default: within]
    #[arg(long, value_enum, ignore_case = true, requires = "lengths")]
    pub(crate) packing: Option<PackingArg>,
    /// Precision of linear layers
    #[arg(long, value_enum, ignore_case = true, default_value_t = PrecisionArg::Bf16)]
    pub(crate) precision: PrecisionArg,
    /// Train low-rank adapters (LoRA) beside frozen weights: rank=16,alpha=32,modules=qkv+proj,dropout=0.05;
    /// modules: q, k, v, proj, fc1, fc2, or qkv, attention, mlp, all [default: alpha twice the rank, all modules]
    #[arg(long, value_parser = values::adapters, value_name = "ADAPTERS")]
    pub(crate) lora: Option<Adapters>,
    /// Share of device memory to leave free: 0.05 or 5%
    #[arg(long, default_value = "5%", value_parser = values::share, allow_hyphen_values = true)]
    pub(crate) headroom: f64,
    /// How much ranks differ from pass to pass, as a share of a pass's time (standard deviation): 0.02 or 2% [default: the
    /// cluster's, else none]
    #[arg(long, value_parser = values::share, allow_hyphen_values = true, value_name = "SHARE")]
    pub(crate) jitter: Option<f64>,
}

/// How documents become sequences.
#[derive(ValueEnum, Debug, Clone, Copy)]
pub(crate) enum PackingArg {
    /// Packed; a token attends to its own document alone
    Within,
    /// Packed; a token attends to everything before it in the sequence
    Across,
    /// One document for each sequence, filled up with padding
    Padded,
}

/// Precision flag.
#[derive(ValueEnum, Debug, Clone, Copy)]
pub(crate) enum PrecisionArg {
    /// Products on TF32 units where the device has them, elsewhere on 32-bit units
    #[value(alias = "float32", alias = "tf32")]
    Fp32,
    #[value(alias = "float16", alias = "half")]
    Fp16,
    #[value(alias = "bfloat16")]
    Bf16,
    Fp8,
}

/// The flag for quiet, of a command whose answer is a file.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct QuietArgs {
    /// No notes on stderr
    #[arg(short, long)]
    pub(crate) quiet: bool,
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
    /// Say what the abbreviations mean
    #[arg(long)]
    pub(crate) explain_terms: bool,
}

/// When to colour.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ColorArg {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    Always,
    Never,
}

/// Money and time of a whole training.
#[derive(Args, Debug, Clone)]
pub(crate) struct BudgetArgs {
    /// Tokens to train on, such as 15T or 300B
    #[arg(long, value_parser = values::tokens, allow_hyphen_values = true)]
    pub(crate) tokens: Option<f64>,
    /// Dollars per GPU and hour [default: the cluster's]
    #[arg(long, value_parser = values::price, allow_hyphen_values = true)]
    pub(crate) price: Option<f64>,
    /// Mean time between failures of a GPU, or 'of a node': 50000h, '5 years per node' [default: as Llama 3's
    /// training had]
    #[arg(long, value_parser = failures::mtbf, value_name = "TIME")]
    pub(crate) mtbf: Option<Mtbf>,
    /// Rate at which all GPUs together write a checkpoint (200GB/s), or the time for which one stops training (30s);
    /// days then include failures
    #[arg(long, value_parser = failures::checkpoint, value_name = "RATE|TIME")]
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Time from a failure until training goes on: 10min
    #[arg(long, value_parser = failures::duration, value_name = "TIME")]
    pub(crate) restart: Option<Seconds>,
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
