//! What can be said on the command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exchange_args::{CalibrateArgs, DiagnoseArgs, ExportArgs, ImportArgs};
pub(crate) use crate::list_args::{CompletionsArgs, ListArgs, SchemaArgs, SchemaFormat};

/// Plans how to shard LLM training, predicts its speed and memory, and says why.
#[derive(Parser, Debug)]
#[command(name = "vescale-plan", version, about, long_about = None, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Subcommands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Find the best plan for a model on a cluster
    Search(SearchArgs),
    /// Predict time and memory of one strategy
    Estimate(EstimateArgs),
    /// Where time and memory of a plan go, and what would change them
    Explain(ExplainArgs),
    /// Two plans, part by part
    Compare(CompareArgs),
    /// The smallest cluster that fits, and time against cost over sizes
    Size(SizeArgs),
    /// Predict published runs and compare
    Validate(ValidateArgs),
    /// HTML report of a plan
    Report(ReportArgs),
    /// Predicted timeline of a plan, for Perfetto or chrome://tracing
    Trace(TraceArgs),
    /// Train under a plan on this machine, and compare with the prediction
    Run(RunArgs),
    /// Measure this machine, for plans and predictions on it
    Profile(ProfileArgs),
    /// Look into, check and reshard checkpoints
    Checkpoint(CheckpointArgs),
    /// A plan as a training system's configuration and launch script; or check a configuration
    Export(ExportArgs),
    /// A training system's configuration as a strategy, predicted
    Import(ImportArgs),
    /// A training log against its plan: where the gap may lie
    Diagnose(DiagnoseArgs),
    /// A cluster file that carries what training logs have shown
    Calibrate(CalibrateArgs),
    /// Known models
    Models(ListArgs),
    /// Known clusters
    Clusters(ListArgs),
    /// Known runtimes
    Runtimes(ListArgs),
    /// JSON Schema of a file format
    Schema(SchemaArgs),
    /// Shell completions
    Completions(CompletionsArgs),
}

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

/// `search`.
#[derive(Args, Debug)]
pub(crate) struct SearchArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    #[command(flatten)]
    pub(crate) constraints: ConstraintArgs,
    #[command(flatten)]
    pub(crate) budget: BudgetArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// What is best
    #[arg(long, value_enum, default_value_t = ObjectiveArg::Time)]
    pub(crate) objective: ObjectiveArg,
    /// Plans to list
    #[arg(long, default_value_t = 5)]
    pub(crate) top: usize,
    /// Simulate every strategy; gives the same best
    #[arg(long)]
    pub(crate) exhaustive: bool,
    /// Threads [default: all cores]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Plan file [default: MODEL-Ngpus-CLUSTER-RUNTIME.plan.yaml]
    #[arg(short, long)]
    pub(crate) output_plan: Option<PathBuf>,
    /// HTML report [default: beside the plan file]
    #[arg(long)]
    pub(crate) report: Option<PathBuf>,
    /// Replace files of another plan or kind
    #[arg(long)]
    pub(crate) force: bool,
}

/// Objective flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectiveArg {
    /// Step time
    Time,
    /// Peak memory
    Memory,
    /// Tokens per dollar; on a fixed number of GPUs the same as time
    Cost,
}

/// `estimate`.
#[derive(Args, Debug)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    /// Strategy: tp=8,pp=4,vpp=2,zero=1,mbs=1,recompute=selective,…
    #[arg(long)]
    pub(crate) strategy: String,
    #[command(flatten)]
    pub(crate) budget: BudgetArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Write the strategy as a plan file
    #[arg(short, long)]
    pub(crate) output_plan: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
}

/// `explain`.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// Plan file
    pub(crate) plan: PathBuf,
    /// A strategy you expected instead
    #[arg(long)]
    pub(crate) why_not: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `compare`.
#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// First plan file
    pub(crate) first: PathBuf,
    /// Second plan file
    pub(crate) second: PathBuf,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `size`.
#[derive(Args, Debug)]
pub(crate) struct SizeArgs {
    /// Model preset, config.json, or folder
    #[arg(long)]
    pub(crate) model: String,
    /// Cluster preset or YAML file
    #[arg(long, default_value = "dgx-h100")]
    pub(crate) cluster: String,
    /// Training system [default: megatron-core; vescale on a profiled machine]
    #[arg(long)]
    pub(crate) runtime: Option<String>,
    /// Tokens per sequence
    #[arg(long, default_value_t = 8192)]
    pub(crate) seq: u64,
    /// Sequences per optimizer step [default: 4 Mi tokens]
    #[arg(long)]
    pub(crate) global_batch: Option<u64>,
    /// Precision of linear layers
    #[arg(long, value_enum, default_value_t = PrecisionArg::Bf16)]
    pub(crate) precision: PrecisionArg,
    /// Share of device memory to leave free
    #[arg(long, default_value_t = 0.05)]
    pub(crate) headroom: f64,
    /// Numbers of GPUs to try [default: powers of two times a node, up to 2048]
    #[arg(long, value_delimiter = ',')]
    pub(crate) gpus: Vec<u64>,
    #[command(flatten)]
    pub(crate) constraints: ConstraintArgs,
    #[command(flatten)]
    pub(crate) budget: BudgetArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `validate`.
#[derive(Args, Debug)]
pub(crate) struct ValidateArgs {
    /// Files of published runs (runs-v1) [default: the embedded ones]
    pub(crate) files: Vec<PathBuf>,
    /// Largest median step-time error allowed, such as 0.12; exit code 5 above it
    #[arg(long)]
    pub(crate) tolerance: Option<f64>,
    /// Fitted constants in place of the shipped (form: catalog/presets/fitted.yaml)
    #[arg(long)]
    pub(crate) constants: Option<PathBuf>,
    /// Fit the fitted constants again without each source in turn and predict that source's runs
    /// (some minutes)
    #[arg(long)]
    pub(crate) leave_one_out: bool,
    /// Runs with the largest errors to list
    #[arg(long, default_value_t = 10)]
    pub(crate) worst: usize,
    /// Only runs whose id contains this
    #[arg(long)]
    pub(crate) only: Option<String>,
    /// Write the error report as Markdown
    #[arg(long)]
    pub(crate) markdown: Option<PathBuf>,
    /// Folder for the plots that the report links
    #[arg(long, default_value = "docs/accuracy")]
    pub(crate) plots: PathBuf,
    /// Groups' errors that may not grow; exit code 5 when one does
    #[arg(long)]
    pub(crate) baseline: Option<PathBuf>,
    /// Write the groups' errors as the new baseline
    #[arg(long)]
    pub(crate) write_baseline: Option<PathBuf>,
    /// Write the residuals that prediction intervals are made of
    #[arg(long)]
    pub(crate) residuals: Option<PathBuf>,
    /// Write the runs that have complete facts, or can be predicted, in the compact form that the
    /// tool embeds
    #[arg(long)]
    pub(crate) export: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `report`.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// Plan file
    pub(crate) plan: PathBuf,
    /// HTML file
    #[arg(short, long)]
    pub(crate) output: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) budget: BudgetArgs,
}

/// `trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// Plan file
    pub(crate) plan: PathBuf,
    /// Trace file
    #[arg(short, long)]
    pub(crate) output: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
}

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
    /// Local: ranks are threads of this process. Mpi: this process is one rank of a job that mpirun or
    /// srun started. Tcp: the same of torchrun, srun or mpirun without MPI; started alone, it starts
    /// the other ranks on this host
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
    /// Profile of this machine to predict times with [default: vescale-profile.yaml, if it is there]
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
    /// Let --trace and --report replace files of any kind
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
    #[arg(long, num_args = 0..=1, value_name = "CHECKPOINT")]
    pub(crate) resume: Option<Option<PathBuf>>,
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
    /// Profile file; one that is there is added to [default: vescale-profile.yaml]
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

/// GPU messages flag.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuMessagesArg {
    /// NCCL
    Nccl,
    /// The memory of their hosts: slow, where NCCL is not installed
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
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NumericsArg {
    Exact,
    Fast,
}
