//! Arguments of the commands that list what the tool knows.

use clap::{Args, ValueEnum};

use super::flags::OutputArgs;

/// Lists.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `schema`.
#[derive(Args, Debug)]
pub(crate) struct SchemaArgs {
    /// Which format; `runtime` is that of the built-in runtimes, which no command reads from a file
    #[arg(value_enum)]
    pub(crate) format: SchemaFormat,
}

/// Formats with a schema.
#[derive(ValueEnum, Debug, Clone, Copy)]
pub(crate) enum SchemaFormat {
    Plan,
    Cluster,
    ClusterExtension,
    Device,
    Runtime,
    Constraints,
    Runs,
    Profile,
}

/// `doc`.
#[derive(Args, Debug)]
pub(crate) struct DocArgs {
    /// Which topic [default: all topics are listed]
    #[arg(value_enum)]
    pub(crate) topic: Option<DocTopic>,
}

/// Topics of `doc`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DocTopic {
    /// How a strategy is written, and what each key means
    Strategies,
    /// How to fix, bound or forbid dimensions of a search
    Constraints,
    /// How to name or describe a cluster
    Clusters,
    /// How to name or describe a model
    Models,
    /// Defaults from files and the environment
    Settings,
    /// What exit codes mean
    ExitCodes,
}

/// `man`.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Command, such as search, or checkpoint inspect [default: the page of the program]
    pub(crate) command: Vec<String>,
}

/// `completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// Shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}
