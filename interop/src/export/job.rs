//! What an exporter is given and what it returns: the job, the files, and the line that heads each file.

use catalog::Workload;
use catalog::model::ModelConfig;

use crate::config::escape;
use plans::decisions::Decisions;
use plans::plan_file::ShardingFile;

/// What starts the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `torchrun` on every node.
    Torchrun,
    /// A Slurm batch script.
    Slurm,
    /// A Kubernetes indexed job.
    Kubernetes,
}

/// What is exported.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Model.
    pub model: &'a ModelConfig,
    /// Its preset or path, as the plan names it.
    pub model_name: &'a str,
    /// Decisions.
    pub decisions: &'a Decisions,
    /// Devices, sequence, batch, precision.
    pub workload: &'a Workload,
    /// Runtime that the plan was predicted for.
    pub runtime: &'a str,
    /// Placements of parameters and activations.
    pub sharding: &'a ShardingFile,
    /// The plan's id.
    pub id: &'a str,
    /// Devices per host.
    pub gpus_per_node: u64,
}

/// One file of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedFile {
    /// Name, without folder.
    pub name: String,
    /// Content.
    pub text: String,
    /// Whether it is to be run.
    pub executable: bool,
}

/// Files and what to know about them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Files; the configuration first.
    pub files: Vec<ExportedFile>,
    /// Where the system does less than the plan allows, one sentence each.
    pub notes: Vec<String>,
}

/// The first line of every file, as a comment takes it.
pub(crate) fn heading(job: &Job<'_>) -> String {
    escape::comment(&title(job))
}

/// The same as a Python module's documentation takes it.
pub(crate) fn python_heading(job: &Job<'_>) -> String {
    format!("\"\"\"{}.\"\"\"\n\n", escape::docstring(&title(job)))
}

fn title(job: &Job<'_>) -> String {
    format!(
        "vescale-plan {} · {} on {} GPUs: {}",
        job.id,
        job.model.name,
        job.workload.gpus,
        plans::grammar::short(job.decisions)
    )
}
