//! Plans as the configuration of a training system: every decision arrives in the system's own
//! keys, or the export is refused with the reason and the choice that the system can express.

mod bridge;
mod deepspeed;
mod hf;
mod launch;
pub(crate) mod megatron;
mod model;
mod nanotron;
pub mod schema;
pub(crate) mod torchtitan;
mod vescale;

use catalog::Workload;
use catalog::model::ModelConfig;

use self::launch::Program;
use self::torchtitan::Edition;
use crate::config::escape;
use plans::plan_file::ShardingFile;
use plans::strategy::Decisions;

/// A training system's configuration format at a stated version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dialect {
    /// Megatron-LM command line, core 0.20.
    MegatronLm,
    /// Megatron Bridge, main of 2026-08.
    MegatronBridge,
    /// torchtitan 0.3, Python.
    Torchtitan03,
    /// torchtitan 0.2, TOML.
    Torchtitan02,
    /// torchtitan main of 2026-08, Python, batch in tokens.
    TorchtitanMain,
    /// DeepSpeed 0.19, JSON.
    DeepSpeed,
    /// accelerate 1.15 with FSDP2, YAML.
    Accelerate,
    /// axolotl 0.19, YAML.
    Axolotl,
    /// nanotron main of 2026-04, YAML.
    Nanotron,
    /// veScale's sharding plan (legacy API), Python.
    VeScale,
}

impl Dialect {
    /// Every dialect; the first of a target is its default version.
    pub const ALL: [Self; 10] = [
        Self::MegatronLm,
        Self::MegatronBridge,
        Self::Torchtitan03,
        Self::Torchtitan02,
        Self::TorchtitanMain,
        Self::DeepSpeed,
        Self::Accelerate,
        Self::Axolotl,
        Self::Nanotron,
        Self::VeScale,
    ];

    /// The training system.
    #[must_use]
    pub fn target(self) -> &'static str {
        match self {
            Self::MegatronLm => "megatron-lm",
            Self::MegatronBridge => "megatron-bridge",
            Self::Torchtitan02 | Self::Torchtitan03 | Self::TorchtitanMain => "torchtitan",
            Self::DeepSpeed => "deepspeed",
            Self::Accelerate => "accelerate",
            Self::Axolotl => "axolotl",
            Self::Nanotron => "nanotron",
            Self::VeScale => "vescale",
        }
    }

    /// Its version.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::MegatronLm => "0.20",
            Self::Torchtitan02 => "0.2",
            Self::Torchtitan03 => "0.3",
            Self::MegatronBridge | Self::TorchtitanMain | Self::Nanotron => "main",
            Self::DeepSpeed | Self::Axolotl => "0.19",
            Self::Accelerate => "1.15",
            Self::VeScale => "legacy",
        }
    }

    /// `target@version`.
    #[must_use]
    pub fn name(self) -> String {
        format!("{}@{}", self.target(), self.version())
    }

    /// The runtime whose search space is nearest to what this target expresses.
    #[must_use]
    pub fn runtime(self) -> &'static str {
        match self {
            Self::MegatronLm | Self::MegatronBridge => "megatron-core",
            Self::Torchtitan02 | Self::Torchtitan03 | Self::TorchtitanMain => "torchtitan",
            Self::DeepSpeed => "deepspeed",
            Self::Accelerate | Self::Axolotl => "fsdp2",
            Self::Nanotron => "megatron-2022",
            Self::VeScale => "vescale",
        }
    }

    /// What this target lacks within that runtime's space, as keys and values of `search --fix`.
    #[must_use]
    pub fn limits(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::MegatronLm | Self::MegatronBridge | Self::DeepSpeed => &[],
            Self::Accelerate | Self::Axolotl => &[("zero", "0|2|3")],
            Self::Torchtitan02 | Self::Torchtitan03 | Self::TorchtitanMain => {
                &[("cp_kind", "all_gather")]
            }
            Self::Nanotron => &[("schedule", "1f1b"), ("recompute", "none|full")],
            Self::VeScale => &[
                ("cp", "1"),
                ("ep", "1"),
                ("etp", "1"),
                ("zero", "0|1"),
                ("recompute", "none"),
                ("schedule", "1f1b|interleaved|gpipe|zb-h1"),
            ],
        }
    }

    /// Parses `target` or `target@version`.
    ///
    /// # Errors
    /// Unknown targets and versions, with the known ones.
    pub fn parse(text: &str) -> Result<Self, ExportError> {
        let (target, version) = match text.split_once('@') {
            Some((target, version)) => (target, Some(version)),
            None => (text, None),
        };
        let mut of_target = Self::ALL.into_iter().filter(|d| d.target() == target);
        let found = match version {
            None => of_target.next(),
            Some(version) => of_target.find(|d| d.version() == version),
        };
        if let Some(found) = found {
            return Ok(found);
        }
        let known: Vec<&str> = Self::ALL
            .iter()
            .filter(|d| d.target() == target)
            .map(|d| d.version())
            .collect();
        if !known.is_empty() {
            return Err(ExportError::UnknownVersion {
                target: target.to_owned(),
                asked: version.unwrap_or_default().to_owned(),
                known: known.join(", "),
            });
        }
        let mut targets: Vec<&str> = Self::ALL.iter().map(|d| d.target()).collect();
        targets.dedup();
        let nearest = catalog::suggest::nearest(target, &targets);
        Err(ExportError::UnknownTarget {
            asked: target.chars().take(80).collect(),
            hint: nearest.map_or_else(String::new, |t| format!("did you mean `{t}`? ")),
            known: targets.join(", "),
        })
    }
}

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

/// A decision that the target cannot express.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The decision, as `--strategy` or the command line writes it, such as `zero=2`.
    pub decision: String,
    /// Why not.
    pub why: String,
    /// The choice to make instead, as key and value of `--strategy`; none when it is no decision of
    /// the strategy.
    pub instead: Option<(&'static str, String)>,
}

/// Why there is no export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// No such target.
    #[error("unknown target `{asked}`; {hint}targets: {known}")]
    UnknownTarget {
        /// What was asked.
        asked: String,
        /// Did you mean.
        hint: String,
        /// All targets.
        known: String,
    },
    /// No such version of the target.
    #[error("{target} has no version `{asked}`; versions: {known}")]
    UnknownVersion {
        /// Target.
        target: String,
        /// What was asked.
        asked: String,
        /// Its versions, the default first.
        known: String,
    },
    /// The target cannot express the plan.
    #[error("{target} cannot express this plan:{}", listed(refusals))]
    Inexpressible {
        /// Target and version.
        target: String,
        /// What it cannot express, with what it can.
        refusals: Vec<Refusal>,
    },
}

fn listed(refusals: &[Refusal]) -> String {
    refusals.iter().fold(String::new(), |mut text, r| {
        text.push_str(&format!("\n  {}: {}", r.decision, r.why));
        if let Some((key, value)) = &r.instead {
            text.push_str(&format!("; nearest: {key}={value}"));
        }
        text
    })
}

/// Collects refusals and notes while an exporter writes.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    refusals: Vec<Refusal>,
    notes: Vec<String>,
}

impl Limits {
    /// Refuses `decision` when `refused`, offering `instead`.
    pub(crate) fn refuse(
        &mut self,
        refused: bool,
        decision: impl Into<String>,
        why: impl Into<String>,
        instead: Option<(&'static str, String)>,
    ) {
        if refused {
            self.refusals.push(Refusal {
                decision: decision.into(),
                why: why.into(),
                instead,
            });
        }
    }

    /// Says something the user should know.
    pub(crate) fn note(&mut self, when: bool, text: impl Into<String>) {
        if when {
            self.notes.push(text.into());
        }
    }
}

/// Writes a plan for a training system, with the script that starts it if one is asked for.
///
/// # Errors
/// When the system cannot express the plan.
pub fn export(
    job: &Job<'_>,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    // What has no effect must not be refused, nor set a switch that needs another.
    let decisions = job.decisions.canonical();
    let job = &Job {
        decisions: &decisions,
        ..*job
    };
    let mut limits = Limits::default();
    let (mut files, program) = match dialect {
        Dialect::MegatronLm => (megatron::files(job, &mut limits), megatron::program(job)),
        Dialect::MegatronBridge => (bridge::files(job, &mut limits), bridge::program()),
        Dialect::Torchtitan02 => titan(job, Edition::Toml02, &mut limits),
        Dialect::Torchtitan03 => titan(job, Edition::Python03, &mut limits),
        Dialect::TorchtitanMain => titan(job, Edition::PythonMain, &mut limits),
        Dialect::DeepSpeed => (deepspeed::files(job, &mut limits), deepspeed::program()),
        Dialect::Accelerate => (
            hf::accelerate(job, &mut limits),
            hf::accelerate_program(job),
        ),
        Dialect::Axolotl => (hf::axolotl(job, &mut limits), hf::axolotl_program()),
        Dialect::Nanotron => (nanotron::files(job, &mut limits), nanotron::program()),
        Dialect::VeScale => (vescale::files(job, &mut limits), vescale::program()),
    };
    if let Some(launcher) = launcher {
        let script = launch::script(job, launcher, &program, &files);
        files.push(script);
    }
    if limits.refusals.is_empty() {
        let notes = limits.notes;
        return Ok(Exported { files, notes });
    }
    Err(ExportError::Inexpressible {
        target: dialect.name(),
        refusals: limits.refusals,
    })
}

fn titan(job: &Job<'_>, edition: Edition, limits: &mut Limits) -> (Vec<ExportedFile>, Program) {
    let files = torchtitan::files(job, edition, limits);
    (files, torchtitan::program(edition))
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
