//! The arguments of the command line.

pub(crate) mod examples;
mod exchange;
mod flags;
mod lists;
mod planning;
mod training;
pub(crate) mod words;

use clap::{CommandFactory, Parser, Subcommand};

pub(crate) use exchange::*;
pub(crate) use flags::*;
pub(crate) use lists::*;
pub(crate) use planning::*;
pub(crate) use training::*;

/// Plans how to shard LLM training, predicts its speed and memory, and says why.
#[derive(Parser, Debug)]
#[command(name = "vescale-plan", version, about, long_about = None, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// When to colour
    #[arg(long, value_enum, global = true, default_value_t = ColorArg::Auto, value_name = "WHEN")]
    pub(crate) color: ColorArg,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The command line with examples in every help.
pub(crate) fn command() -> clap::Command {
    // What a file of `--from` says need not be given.
    let command = Cli::command().mut_subcommand("search", |search| {
        let search = search.mut_arg("model", |arg| arg.required(false));
        let search = search.mut_arg("gpus", |arg| arg.required(false));
        search.override_usage(
            "vescale-plan search [OPTIONS] --model <MODEL> --gpus <GPUS>\n       \
             vescale-plan search [OPTIONS] --from <FILE|STRATEGY>",
        )
    });
    let names = names_below(&command).into_iter();
    let command = names.fold(command, |command, name| {
        command.mut_subcommand(name, with_negative_numbers)
    });
    with_examples(command, "")
}

/// The commands below a command.
pub(crate) fn names_below(command: &clap::Command) -> Vec<String> {
    let below = command.get_subcommands();
    below.map(|sub| sub.get_name().to_owned()).collect()
}

/// A command of this name, and those below it, with examples in their help.
fn with_examples(command: clap::Command, name: &str) -> clap::Command {
    let below = names_below(&command).into_iter();
    below.fold(command.after_help(examples::help(name)), |command, sub| {
        let whole = format!("{name} {sub}");
        command.mut_subcommand(sub, |sub| with_examples(sub, whole.trim_start()))
    })
}

/// Lets options take negative numbers as values, so that an error names the option.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command.mut_args(
        |arg| match arg.get_action().takes_values() && !arg.is_positional() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        },
    )
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
    /// The best plan for the GPUs that are left, and the cost of continuing under it
    Replan(ReplanArgs),
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
    /// What defaults hold, and where each was set
    Config(ListArgs),
    /// How to write strategies, constraints, clusters and models; exit codes
    Doc(DocArgs),
    /// JSON Schema of a file format
    Schema(SchemaArgs),
    /// Shell completions
    Completions(CompletionsArgs),
    /// Manual page of a command
    Man(ManArgs),
}
