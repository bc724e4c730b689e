//! The input and output of an exporter: the job, the files, and the header of each file.

use catalog::model::ModelConfig;
use catalog::runtime::Rewrite;
use catalog::state_types::StateTypes;
use catalog::{Cluster, Fp8Recipe, GradientTypes, Precision, Runtime, Workload};
use strum::EnumCount;

use super::assumptions::Assumption;
use super::inputs::{self, Inputs, Unfilled};
use crate::config::escape;
use plans::decisions::Decisions;
use plans::plan_file::ShardingFile;

/// How the ranks are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumCount)]
pub enum Launcher {
    /// `torchrun` on every node.
    Torchrun,
    /// A Slurm batch script that runs `torchrun`.
    Slurm,
    /// A Kubernetes indexed job that runs `torchrun`.
    Kubernetes,
}

impl Launcher {
    /// Every way to start the ranks.
    pub const ALL: [Self; Self::COUNT] = [Self::Torchrun, Self::Slurm, Self::Kubernetes];

    /// Name of the script or manifest.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Torchrun => "launch.sh",
            Self::Slurm => "launch.sbatch",
            Self::Kubernetes => "job.yaml",
        }
    }
}

/// The id of the plan that an exported script or manifest was made of; `None` for text of another origin.
#[must_use]
pub fn plan_of(text: &str) -> Option<&str> {
    let mut header = text.lines().take_while(|line| line.starts_with('#'));
    header.find_map(|line| {
        let (id, _) = line.strip_prefix("# vescale-plan ")?.split_once(" · ")?;
        Some(id)
    })
}

/// The plan to export, with everything it depends on.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The model to train.
    pub model: &'a ModelConfig,
    /// The plan's decisions.
    pub decisions: &'a Decisions,
    /// Number of devices, sequence length, batch, precision.
    pub workload: &'a Workload,
    /// The runtime that the plan was predicted for, which determines what the prediction assumed.
    pub runtime: &'a Runtime,
    /// Placements of parameters and activations.
    pub sharding: &'a ShardingFile,
    /// The plan's id, a content hash.
    pub id: &'a str,
    /// The cluster that it runs on.
    pub cluster: &'a Cluster,
    /// Tokenizer, data, and the model's name on the hub.
    pub inputs: Inputs<'a>,
}

impl Job<'_> {
    /// Whether the prediction assumed a rewrite.
    pub(crate) fn assumes(&self, rewrite: Rewrite) -> bool {
        self.runtime.rewrites.contains(&rewrite)
    }

    /// The types in which the plan holds and reduces states.
    pub(crate) fn state_types(&self) -> StateTypes {
        let precision = self.workload.precision;
        self.decisions.state_types(self.runtime, precision)
    }

    /// The types in which the plan holds and reduces gradients.
    pub(crate) fn gradient_types(&self) -> GradientTypes {
        let types = self.state_types();
        let computed = self.workload.precision.activation();
        GradientTypes {
            held: types.gradient.unwrap_or(computed),
            reduced: types.reduce,
        }
    }

    /// PyTorch's name for the type in which layers compute, 8-bit products aside.
    pub(crate) fn dtype(&self) -> &'static str {
        match self.workload.precision {
            Precision::Fp32 => "float32",
            Precision::Fp16 => "float16",
            Precision::Bf16 | Precision::Fp8 => "bfloat16",
        }
    }

    /// How the plan scales operands of 8-bit products.
    pub(crate) fn fp8_recipe(&self) -> Fp8Recipe {
        let chosen = self.decisions.fp8_recipe;
        chosen.unwrap_or(self.runtime.fp8_recipe)
    }
}

/// One file of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedFile {
    /// File name, without folder.
    pub name: String,
    /// Content of the file.
    pub text: String,
    /// Whether the file is to be executed.
    pub executable: bool,
}

/// The result of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The files, with the configuration first.
    pub files: Vec<ExportedFile>,
    /// Sentences on what is left to the user, and where the system does not follow the plan.
    pub notes: Vec<String>,
    /// Inputs still to be filled in before the launch; the launch script stops until they are.
    pub unfilled: Vec<Unfilled>,
    /// Assumptions of the prediction that the target does not meet.
    pub unmet: Vec<Assumption>,
}

/// How a file holds its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heading {
    /// As lines that begin with `#`.
    Hash,
    /// As a Python module's docstring.
    Docstring,
    /// The file has no header, as in JSON.
    Nowhere,
}

/// A file without its header, which lists the inputs still to be filled in and so is written last.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    /// File name, without folder.
    pub(crate) name: String,
    heading: Heading,
    /// Content below the header.
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

    /// The file with its header.
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

/// The header of a file as comments: what the file is, and which inputs are still to be filled in.
pub(crate) fn comments(job: &Job<'_>, unfilled: &[Unfilled]) -> String {
    let mut text = format!("# {}\n", heading(job));
    for line in inputs::lines(unfilled) {
        text.push_str(&format!("# {}\n", escape::comment(&line)));
    }
    text
}

/// The first line of every header, safe within a comment.
pub(crate) fn heading(job: &Job<'_>) -> String {
    escape::comment(&title(job))
}

fn title(job: &Job<'_>) -> String {
    let gpus = match job.workload.gpus {
        1 => "1 GPU".to_owned(),
        many => format!("{many} GPUs"),
    };
    format!(
        "vescale-plan {} · {} on {gpus}: {}",
        job.id,
        job.model.name,
        plans::grammar::written(job.decisions, job.runtime)
    )
}
