//! Arguments of the commands that plan and predict.

use std::path::PathBuf;

use answers::failures::{self, Checkpoint};
use answers::losses::{self, Loss};
use answers::values;
use clap::{Args, ValueEnum};

use super::flags::{AssumedArgs, BudgetArgs, ConstraintArgs, OutputArgs, QuietArgs, ScenarioArgs};

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
    /// Compare the strategy that you train with now with the best plan. Give a configuration file of your training
    /// system, a plan file, or a strategy such as 'tp8 pp2'; a file also gives the model, GPUs and batch that it names
    #[arg(long, value_name = "FILE|STRATEGY")]
    pub(crate) from: Option<String>,
    /// On a cluster of several pools: those that --from runs on, in the order of its pipeline:
    /// dgx-a100, or 'dgx2-v100 + dgx-a100' [default: all, or those that it can run on]
    #[arg(long, value_name = "POOLS", requires = "from")]
    pub(crate) on: Option<String>,
    /// Decisions of --from that the best plan must not change, such as tp,ep
    #[arg(long, value_name = "DECISIONS", requires = "from")]
    pub(crate) keep: Vec<String>,
    /// What to optimise
    #[arg(long, value_enum, default_value_t = ObjectiveArg::Time)]
    pub(crate) objective: ObjectiveArg,
    /// Largest probability that a plan does not fit, above 0 and below 1; above 0.5 also plans for which the allocator has to
    /// cache less
    #[arg(long, default_value_t = planner::RISK)]
    pub(crate) risk: f64,
    /// Layouts to list, each by one plan
    #[arg(long, default_value_t = answers::search::TOP)]
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
    /// Replace files of another kind and, under a default name, of another plan
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
    /// Tokens per dollar; on a fixed number of GPUs the same order as time
    Cost,
    /// Days of the whole training with failures; on a fixed number of GPUs the same order as time
    TimeToTrain,
}

/// `estimate`.
#[derive(Args, Debug)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    /// Strategy, in any form: tp=8,pp=4,recompute=selective or 'tp8 pp4 recompute=selective'; what is left out is
    /// the runtime's default (`vescale-plan doc strategies`)
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) strategy: String,
    #[command(flatten)]
    pub(crate) budget: BudgetArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Write the strategy as a plan file
    #[arg(short, long)]
    pub(crate) output_plan: Option<PathBuf>,
    /// Write an HTML report
    #[arg(long)]
    pub(crate) report: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
}

/// `explain`.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// Plan file
    pub(crate) plan: PathBuf,
    /// A strategy you expected instead, such as tp=8,pp=4
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
    /// More plan files, for --report
    #[arg(requires = "report")]
    pub(crate) others: Vec<PathBuf>,
    /// Write an HTML page with the plans side by side
    #[arg(long)]
    pub(crate) report: Option<PathBuf>,
    /// Replace a file of any kind
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `size`.
#[derive(Args, Debug)]
pub(crate) struct SizeArgs {
    /// Model preset, config.json, or folder
    #[arg(long)]
    pub(crate) model: String,
    /// Cluster preset, YAML file, one line such as 'h100-sxm x 8 per node, 400 Gb/s x 8', or pools such as '64 x dgx-a100 +
    /// 32 x dgx2-v100' [default: dgx-h100]
    #[arg(long)]
    pub(crate) cluster: Option<String>,
    /// Training system [default: megatron-core; vescale on a profiled machine]
    #[arg(long)]
    pub(crate) runtime: Option<String>,
    /// Tokens per sequence; 8k is 8192 [default: 8192, or fewer if the model's learned table of positions is shorter]
    #[arg(long, value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) seq: Option<u64>,
    /// Sequences per optimizer step [default: that of `search` with the most GPUs tried, made a multiple for all sizes
    /// if that takes a factor of at most 315]
    #[arg(long, value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) global_batch: Option<u64>,
    #[command(flatten)]
    pub(crate) assumed: AssumedArgs,
    /// Largest probability that a plan does not fit, above 0 and below 1; above 0.5 also plans for which the allocator has to
    /// cache less
    #[arg(long, default_value_t = planner::RISK)]
    pub(crate) risk: f64,
    /// Numbers of GPUs to try; several pools are used up in their order [default: powers of two
    /// below a node and times a node, up to 2048 or, pool by pool, up to all]
    #[arg(long, value_delimiter = ',', value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) gpus: Vec<u64>,
    #[command(flatten)]
    pub(crate) constraints: ConstraintArgs,
    #[command(flatten)]
    pub(crate) budget: BudgetArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `replan`.
#[derive(Args, Debug)]
pub(crate) struct ReplanArgs {
    /// Plan file that was in use
    pub(crate) plan: PathBuf,
    /// GPUs that were lost: 16, or 2nodes. On a cluster of several pools name the pool, '2nodes of
    /// dgx2-v100', and repeat the flag for every pool that lost some
    #[arg(long, required = true, value_delimiter = ',', value_parser = losses::loss, allow_hyphen_values = true, value_name = "GPUS")]
    pub(crate) lost: Vec<Loss>,
    /// Sequences per optimizer step [default: the plan's, or if nothing fits then, the nearest that the GPUs divide]
    #[arg(long, value_parser = values::count, allow_hyphen_values = true)]
    pub(crate) global_batch: Option<u64>,
    /// Decisions to leave as they are in the plan: tp,pp
    #[arg(long, value_name = "DECISIONS")]
    pub(crate) keep: Vec<String>,
    #[command(flatten)]
    pub(crate) constraints: ConstraintArgs,
    /// Largest probability that the plan does not fit, above 0 and below 1
    #[arg(long, default_value_t = planner::RISK)]
    pub(crate) risk: f64,
    /// Rate at which all GPUs together read a checkpoint (200GB/s), or the time that it takes (30s)
    #[arg(long, value_parser = failures::checkpoint, value_name = "RATE|TIME")]
    pub(crate) checkpoint: Option<Checkpoint>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Plan file [default: beside the old plan, with the number of GPUs in its name]
    #[arg(short, long)]
    pub(crate) output_plan: Option<PathBuf>,
    /// Replace files of another kind and, under a default name, of another plan
    #[arg(long)]
    pub(crate) force: bool,
}

/// `validate`.
#[derive(Args, Debug)]
pub(crate) struct ValidateArgs {
    /// Files of published runs (runs-v1) [default: the embedded ones]
    pub(crate) files: Vec<PathBuf>,
    /// Largest median step-time error allowed, such as 0.12; exit code 5 above it
    #[arg(long, value_parser = values::at_least_0, allow_hyphen_values = true)]
    pub(crate) tolerance: Option<f64>,
    /// Fitted constants in place of the built-in ones (form: catalog/presets/fitted.yaml)
    #[arg(long)]
    pub(crate) constants: Option<PathBuf>,
    /// Fit the fitted constants again without each source in turn and predict that source's runs
    /// (some minutes)
    #[arg(long)]
    pub(crate) leave_source_out: bool,
    /// Also predict each left-out source after this many of its own runs are known, such as 1,3
    #[arg(
        long,
        value_name = "RUNS",
        value_delimiter = ',',
        requires = "leave_source_out"
    )]
    pub(crate) few_shot: Vec<usize>,
    /// Also predict without each mechanism of the cost model in turn (some minutes)
    #[arg(long)]
    pub(crate) ablate: bool,
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
    /// File of errors of groups that may not grow; exit code 5 when one does
    #[arg(long)]
    pub(crate) baseline: Option<PathBuf>,
    /// Write the groups' errors as the new baseline
    #[arg(long)]
    pub(crate) write_baseline: Option<PathBuf>,
    /// Write the residuals that prediction intervals are made of
    #[arg(long, requires = "leave_source_out")]
    pub(crate) residuals: Option<PathBuf>,
    /// Write the runs that have complete facts, or can be predicted, in the compact form that the
    /// tool embeds
    #[arg(long)]
    pub(crate) export: Option<PathBuf>,
    /// Overwrite existing files of any kind; without it only empty files and files of the kind to
    /// be written are overwritten
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
    #[command(flatten)]
    pub(crate) quiet: QuietArgs,
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
    #[command(flatten)]
    pub(crate) quiet: QuietArgs,
}
