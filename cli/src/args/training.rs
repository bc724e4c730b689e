//! Arguments of the commands that train, measure, and look into checkpoints.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::flags::OutputArgs;

/// Seconds that ranks may wait for each other, at most: a month.
const MOST_TIMEOUT: u64 = 30 * 24 * 3600;

/// `run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// Plan file
    pub(crate) plan: PathBuf,
    /// Steps [default: the plan's]
    #[arg(long)]
    pub(crate) steps: Option<u64>,
    /// Text (.txt), 16-bit tokens (.bin, .u16.bin) or 32-bit tokens (.u32.bin) [default: the plan's]
    #[arg(long)]
    pub(crate) data: Option<PathBuf>,
    /// Seed of every random number [default: the plan's]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Exact: equal to the bit under every layout, slower. Fast: equal within rounding
    #[arg(long, value_enum, default_value_t = NumericsArg::Fast)]
    pub(crate) numerics: NumericsArg,
    /// Replayed: run the model's code once and replay what it did. Eager: run it for every micro-batch.
    /// Graph: replay it, and from the second step on let the GPU run all that a step queued by one call
    /// (CUDA graph; several ranks by two, with NCCL, not with experts on other ranks nor --break-at). Same bits
    #[arg(long, value_enum, default_value_t = ExecutionArg::Replayed)]
    pub(crate) execution: ExecutionArg,
    /// What to train on
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub(crate) device: DeviceArg,
    /// Local: ranks are threads of this process. Mpi: this process is one rank of a job that mpirun
    /// or srun started. Tcp: this process is one rank that torchrun, srun or mpirun started,
    /// without MPI; started alone, it starts the other ranks on this host
    #[arg(long, value_enum, default_value_t = CommunicatorArg::Local)]
    pub(crate) communicator: CommunicatorArg,
    /// With --device cuda: start a process for every rank, each on a GPU of this host
    #[arg(long, value_name = "N", conflicts_with_all = ["communicator", "replan_at"])]
    pub(crate) gpus: Option<u64>,
    /// With --device cuda: what carries messages between GPUs
    #[arg(long, value_enum, default_value_t = GpuMessagesArg::Nccl)]
    pub(crate) gpu_messages: GpuMessagesArg,
    /// With --device cuda: what runs core attention
    #[arg(long, value_enum, default_value_t = AttentionArg::Library)]
    pub(crate) attention: AttentionArg,
    /// With --device cuda: matrix products of a plan in fp32 round their operands to TF32, which tensor
    /// cores multiply [default: they round nothing]
    #[arg(long)]
    pub(crate) tf32: bool,
    /// Seconds a rank waits for another before it gives up
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=MOST_TIMEOUT))]
    pub(crate) timeout: u64,
    /// Profile of this machine to predict times with [default: the plan's cluster if it is a profile, else vescale-profile.yaml if it
    /// is there]
    #[arg(long)]
    pub(crate) profile: Option<PathBuf>,
    /// Write the timeline of the last step, measured and predicted, for Perfetto
    #[arg(long)]
    pub(crate) trace: Option<PathBuf>,
    /// Stop at the first operator of this name, such as model.layers.0.mlp.down_proj, and show what it
    /// read and wrote
    #[arg(long, value_name = "NAME")]
    pub(crate) break_at: Option<String>,
    /// Write an HTML report: measured beside predicted
    #[arg(long)]
    pub(crate) report: Option<PathBuf>,
    /// Write a line of JSON per step: loss, gradient norm, time. With --resume the lines are added to the file
    #[arg(long)]
    pub(crate) log: Option<PathBuf>,
    /// Let --trace, --report and --log replace files of any kind
    #[arg(long)]
    pub(crate) force: bool,
    /// Folder to save checkpoints in; a run from the beginning refuses one that holds an earlier run's
    #[arg(long)]
    pub(crate) checkpoints: Option<PathBuf>,
    /// Steps between checkpoints; the end is always saved
    #[arg(long, default_value_t = 0, requires = "checkpoints")]
    pub(crate) every: u64,
    /// Go on from the last whole checkpoint of --checkpoints or of this folder, or from this checkpoint. It must be
    /// of this run: the same model, data, batch, precision, optimizer, learning rate, steps and seed
    #[arg(long, action = clap::ArgAction::Set, num_args = 0..=1, value_name = "CHECKPOINT")]
    pub(crate) resume: Option<Vec<PathBuf>>,
    /// With --resume: go on from another run's checkpoint too, and say what differs
    #[arg(long, requires = "resume")]
    pub(crate) force_resume: bool,
    /// Begin from weights of the Hugging Face hub: a .safetensors file or a folder of them
    #[arg(long, conflicts_with = "resume")]
    pub(crate) init: Option<PathBuf>,
    /// After STEP steps go on under another plan, resharded in memory
    #[arg(long, num_args = 2, value_names = ["STEP", "PLAN"], conflicts_with = "communicator")]
    pub(crate) replan_at: Option<Vec<String>>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `profile`.
#[derive(Args, Debug)]
pub(crate) struct ProfileArgs {
    /// Plan files whose shapes to measure [default: a grid of shapes]
    pub(crate) plans: Vec<PathBuf>,
    /// What to measure on
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub(crate) device: DeviceArg,
    /// With --device cuda: GPUs to measure messages between [default: all of this host]
    #[arg(long, conflicts_with = "all_hosts")]
    pub(crate) gpus: Option<u64>,
    /// With --device cuda: this process is one of those that torchrun, srun or mpirun started, one for every
    /// GPU of several hosts; messages between hosts are measured too, and rank 0 writes
    #[arg(long)]
    pub(crate) all_hosts: bool,
    /// With --device cuda: what runs core attention
    #[arg(long, value_enum, default_value_t = AttentionArg::Library)]
    pub(crate) attention: AttentionArg,
    /// Quick: a minute or two. Full: more shapes and repetitions
    #[arg(long, value_enum, default_value_t = SuiteArg::Quick)]
    pub(crate) suite: SuiteArg,
    /// Profile file; an existing one is extended [default: vescale-profile.yaml]
    #[arg(short, long)]
    pub(crate) output_profile: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Device flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    /// The processor's cores
    Cpu,
    /// An NVIDIA GPU
    Cuda,
}

/// How GPU messages travel.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuMessagesArg {
    /// NCCL
    Nccl,
    /// The hosts' memory: slow, for machines without NCCL
    Host,
}

/// Attention flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionArg {
    /// cuDNN, where it is installed and takes the sizes, else the project's own kernels
    Library,
    /// The project's own kernels: slower, and a run repeats to the bit
    Own,
}

/// Suite flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SuiteArg {
    Quick,
    Full,
}

/// Communicator flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommunicatorArg {
    Local,
    Mpi,
    Tcp,
}

/// `checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    pub(crate) action: CheckpointAction,
}

/// What to do with a checkpoint.
#[derive(Subcommand, Debug)]
pub(crate) enum CheckpointAction {
    /// What a checkpoint holds
    Inspect(CheckpointPath),
    /// Check every byte, and that nothing is missing
    Verify(CheckpointPath),
    /// Write a checkpoint as another plan would have
    Reshard(ReshardArgs),
    /// Write the weights as a .safetensors file, under the Hugging Face hub's names
    Export(ExportWeightsArgs),
}

/// A checkpoint.
#[derive(Args, Debug)]
pub(crate) struct CheckpointPath {
    /// Checkpoint, or a folder of them (the last one)
    pub(crate) path: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `checkpoint export`.
#[derive(Args, Debug)]
pub(crate) struct ExportWeightsArgs {
    /// Checkpoint, or a folder of them (the last one)
    pub(crate) path: PathBuf,
    /// File to write
    #[arg(short = 'o', long)]
    pub(crate) to: PathBuf,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `checkpoint reshard`.
#[derive(Args, Debug)]
pub(crate) struct ReshardArgs {
    /// Checkpoint, or a folder of them (the last one)
    pub(crate) path: PathBuf,
    /// Plan to write it for
    #[arg(long)]
    pub(crate) plan: PathBuf,
    /// Folder of checkpoints to write to
    #[arg(short = 'o', long)]
    pub(crate) to: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// When a model's code runs, and who queues its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExecutionArg {
    Replayed,
    Eager,
    Graph,
}

/// Numerics flag.
#[derive(ValueEnum, Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NumericsArg {
    Exact,
    Fast,
}
