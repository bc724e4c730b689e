//! What can be said to the commands that list what the tool knows.

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
    /// Which format
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

/// `completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// Shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}
