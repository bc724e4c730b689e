//! Arguments of the commands that work with other training systems.

use std::path::PathBuf;

use answers::values::{self, Gpus};
use clap::{Args, ValueEnum};

use super::flags::OutputArgs;

/// `export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// Plan file
    #[arg(required_unless_present = "check", conflicts_with = "check")]
    pub(crate) plan: Option<PathBuf>,
    /// Training system, with a version if not its default: torchtitan@0.2
    #[arg(
        long,
        value_name = "TARGET[@VERSION]",
        required_unless_present = "check"
    )]
    pub(crate) to: Option<String>,
    /// Folder to write to; all files or none [default: stdout]
    #[arg(short, long, value_name = "DIR", conflicts_with = "check")]
    pub(crate) output: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    /// Also write a launch script
    #[arg(long, value_enum, conflicts_with = "check")]
    pub(crate) launcher: Option<LauncherArg>,
    /// Tokenizer of the launched job: a folder or hub name
    #[arg(long, value_name = "NAME", conflicts_with = "check")]
    pub(crate) tokenizer: Option<String>,
    /// Dataset of the launched job: a path or hub name, as the target reads it
    #[arg(long, value_name = "NAME", conflicts_with = "check")]
    pub(crate) data: Option<String>,
    /// The model's name on the Hugging Face hub, or a folder in its format
    #[arg(long, value_name = "NAME", conflicts_with = "check")]
    pub(crate) hf_id: Option<String>,
    /// Find unknown keys, wrong values and contradictions in an existing configuration
    #[arg(long, value_name = "FILE")]
    pub(crate) check: Option<PathBuf>,
    /// With --check: the model of the configuration, so that more is checked
    #[arg(long, requires = "check")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) format: OutputArgs,
}

/// Launcher flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LauncherArg {
    Torchrun,
    Slurm,
    Kubernetes,
}

/// `import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    /// Configuration or launch script of a training system (FILE.py:FUNCTION for one function), or a model's config.json
    pub(crate) file: PathBuf,
    /// Model preset, config.json, or folder [default: FILE, if it is a config.json]
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Cluster preset, YAML file, or one line such as 'h100-sxm x 8 per node, 400 Gb/s x 8' [default: dgx-h100, or that of the
    /// GPUs that --gpus names]
    #[arg(long)]
    pub(crate) cluster: Option<String>,
    /// Number of GPUs, '64 nodes', or '512x h100'; beside a file that says another number, the rest must be data parallelism
    #[arg(long, value_parser = values::gpus, allow_hyphen_values = true)]
    pub(crate) gpus: Option<Gpus>,
    /// Tokens per sequence, where the file does not say; 8k is 8192 [default: the training system's own; as for `search` with
    /// files that have no such key: DeepSpeed's, accelerate's and config.json]
    #[arg(long, value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) seq: Option<u64>,
    /// Runtime to predict with [default: that of the file's training system]
    #[arg(long)]
    pub(crate) runtime: Option<String>,
    /// Training system of the file, if the file does not show it
    #[arg(long, value_name = "TARGET[@VERSION]")]
    pub(crate) from: Option<String>,
    /// Write the strategy as a plan file
    #[arg(short, long)]
    pub(crate) output_plan: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) format: OutputArgs,
}

/// `diagnose`.
#[derive(Args, Debug)]
pub(crate) struct DiagnoseArgs {
    /// Training log of Megatron-LM, torchtitan, nanotron, DeepSpeed, NeMo, MaxText, Hugging Face's Trainer or `run`, or
    /// metrics exported by Weights & Biases or TensorBoard
    pub(crate) log: PathBuf,
    /// Plan of the run
    #[arg(long)]
    pub(crate) plan: PathBuf,
    /// Logged steps to skip [default: a tenth, at least 2]
    #[arg(long)]
    pub(crate) warmup: Option<usize>,
    /// Read on while the job writes, and warn when the run drifts from the prediction
    #[arg(long, conflicts_with = "calibrate")]
    pub(crate) follow: bool,
    /// With --follow, end after this many seconds without a step [default: never]
    #[arg(long, value_name = "SECONDS", requires = "follow", value_parser = values::at_least_0, allow_hyphen_values = true)]
    pub(crate) idle: Option<f64>,
    /// Write what was learned as a cluster file that later predictions use
    #[arg(long, value_name = "FILE")]
    pub(crate) calibrate: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) format: OutputArgs,
}

/// `calibrate`.
#[derive(Args, Debug)]
pub(crate) struct CalibrateArgs {
    /// Training logs
    #[arg(required_unless_present = "measured")]
    pub(crate) logs: Vec<PathBuf>,
    /// The plan of each log, in the same order; without logs, a plan of the job that was measured
    #[arg(long = "plan", required = true)]
    pub(crate) plans: Vec<PathBuf>,
    /// A strategy and its measured step time, such as tp=8,pp=4:8.1s, of the (first) plan's model, cluster and batch; may
    /// be given several times
    #[arg(long, value_name = "STRATEGY:TIME")]
    pub(crate) measured: Vec<String>,
    /// Logged steps to skip [default: a tenth, at least 2]
    #[arg(long)]
    pub(crate) warmup: Option<usize>,
    /// Cluster file to write; give it to --cluster
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) format: OutputArgs,
}
