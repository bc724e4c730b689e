//! What an exporter is given and what it returns: the job, the files, and the line that heads each file.

use catalog::model::ModelConfig;
use catalog::runtime::Rewrite;
use catalog::{Runtime, Workload};

use super::assumptions::Assumption;
use super::inputs::{self, Inputs, Unfilled};
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
    /// Decisions.
    pub decisions: &'a Decisions,
    /// Devices, sequence, batch, precision.
    pub workload: &'a Workload,
    /// Runtime that the plan was predicted for: what its prediction assumed.
    pub runtime: &'a Runtime,
    /// Placements of parameters and activations.
    pub sharding: &'a ShardingFile,
    /// The plan's id.
    pub id: &'a str,
    /// Devices per host.
    pub gpus_per_node: u64,
    /// Tokenizer, data, and the model's name on the hub.
    pub inputs: Inputs<'a>,
}

impl Job<'_> {
    /// Whether the prediction assumed a rewrite.
    pub(crate) fn assumes(&self, rewrite: Rewrite) -> bool {
        self.runtime.rewrites.contains(&rewrite)
    }
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
    /// What is still to be filled in before the launch; the launch script stops until it is.
    pub unfilled: Vec<Unfilled>,
    /// What the prediction assumed and the target does otherwise.
    pub unmet: Vec<Assumption>,
}

/// How a file takes what is said at its top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heading {
    /// Lines that begin with `#`.
    Hash,
    /// A Python module's documentation.
    Docstring,
    /// Not at all (JSON).
    Nowhere,
}

/// A file without its top, which lists what is still to be filled in and so is written last.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    /// Name, without folder.
    pub(crate) name: String,
    heading: Heading,
    /// Content below the top.
    pub(crate) text: String,
}

impl Draft {
    pub(crate) fn new(name: &str, heading: Heading, text: String) -> Self {
        Self {
            name: name.to_owned(),
            heading,
            text,
        }
    }

    /// The file with its top.
    pub(crate) fn file(self, job: &Job<'_>, unfilled: &[Unfilled]) -> ExportedFile {
        let lines = inputs::lines(unfilled);
        let top = match self.heading {
            Heading::Nowhere => String::new(),
            Heading::Hash => comments(job, unfilled),
            Heading::Docstring => {
                let lines: Vec<String> = lines.iter().map(|l| escape::docstring(l)).collect();
                let list = if lines.is_empty() {
                    String::new()
                } else {
                    format!("\n\n{}\n", lines.join("\n"))
                };
                format!("\"\"\"{}.{list}\"\"\"\n\n", escape::docstring(&title(job)))
            }
        };
        ExportedFile {
            name: self.name,
            text: top + &self.text,
            executable: false,
        }
    }
}

/// The first lines of a file, as comments: what it is, and what is still to be filled in.
pub(crate) fn comments(job: &Job<'_>, unfilled: &[Unfilled]) -> String {
    let mut text = format!("# {}\n", heading(job));
    for line in inputs::lines(unfilled) {
        text.push_str(&format!("# {}\n", escape::comment(&line)));
    }
    text
}

/// The first line of every file, as a comment takes it.
pub(crate) fn heading(job: &Job<'_>) -> String {
    escape::comment(&title(job))
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
