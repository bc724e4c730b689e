//! A plan file that was opened, whether or not all of its replicas are alike.

use std::iter;
use std::path::Path;

use catalog::paths::beside;
use costmodel::{CostModel, Scenario};
use plans::{PlanFile, Prediction, Strategy, grammar};
use reports::groups::{self, Group, sequences};
use reports::words;

use crate::error::AnswerError;
use crate::inputs::{Inputs, InputsJson};
use crate::opened::Opened;
use crate::together::Together;

/// Name of the fact that says which cluster a plan is for.
pub const CLUSTER: &str = "cluster";

/// A plan that was opened.
pub enum Planned {
    /// All of its replicas are alike.
    Alike(Box<Opened>),
    /// It has several groups of replicas, each with a strategy of its own.
    Groups(Box<PlanFile>, Box<Together>),
}

impl Planned {
    /// Opens a plan file that was read from `path`.
    ///
    /// # Errors
    /// When the file names a model, cluster or runtime that is not there, or contradicts itself.
    pub fn of(file: PlanFile, path: &Path) -> Result<Self, AnswerError> {
        if file.groups.is_empty() {
            return Ok(Self::Alike(Box::new(Opened::of(file, path)?)));
        }
        let together = Together::of_plan(&file, path)?;
        Ok(Self::Groups(Box::new(file), Box::new(together)))
    }

    /// Its time and memory as predicted now.
    ///
    /// # Errors
    /// When it cannot be priced.
    pub fn prediction(&self) -> Result<Prediction, AnswerError> {
        match self {
            Self::Alike(plan) => Ok(plan.costs.predict(&plan.strategy)?),
            Self::Groups(_, together) => Ok(together.prediction.clone()),
        }
    }

    /// The question that it answers; its file was read from `path`.
    #[must_use]
    pub fn inputs(&self, path: &Path) -> Inputs {
        match self {
            Self::Alike(plan) => Inputs {
                scenario: plan.scenario.clone(),
                model_arg: beside(path, &plan.file.model),
                cluster_arg: beside(path, &plan.file.cluster),
                json: plan.inputs.clone(),
            },
            Self::Groups(_, together) => together.inputs.clone(),
        }
    }

    /// The question that it answers, as JSON echoes it.
    #[must_use]
    pub fn question(&self) -> &InputsJson {
        match self {
            Self::Alike(plan) => &plan.inputs,
            Self::Groups(_, together) => &together.inputs.json,
        }
    }

    /// Its file.
    #[must_use]
    pub fn file(&self) -> &PlanFile {
        match self {
            Self::Alike(plan) => &plan.file,
            Self::Groups(file, _) => file,
        }
    }

    /// The id of its file.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.file().id
    }

    /// The cost models of its replicas, group by group.
    #[must_use]
    pub fn costs(&self) -> Vec<&CostModel> {
        match self {
            Self::Alike(plan) => vec![&plan.costs],
            Self::Groups(_, together) => (together.parts.iter())
                .map(|part| part.costs.as_ref())
                .collect(),
        }
    }

    /// The scenario of the whole job, all groups together.
    #[must_use]
    pub fn scenario(&self) -> &Scenario {
        match self {
            Self::Alike(plan) => &plan.scenario,
            Self::Groups(_, together) => &together.inputs.scenario,
        }
    }

    /// Its job in words: model, devices and runtime.
    #[must_use]
    pub fn job(&self) -> String {
        let [model, devices, _, runtime, ..] = self.facts().map(|(_, value)| value);
        format!("{model} on {devices}, {runtime}")
    }

    /// What it is for, fact by fact: model, devices and their cluster, runtime, and the sequences of a step.
    #[must_use]
    pub fn facts(&self) -> [(&'static str, String); 7] {
        let scenario = self.scenario();
        let workload = &scenario.workload;
        let cluster = &scenario.cluster;
        let calibrated = match &cluster.calibration {
            Some(_) => ", calibrated by measured runs",
            None => "",
        };
        [
            ("model", scenario.model.name.clone()),
            ("devices", cluster.devices(workload.gpus)),
            (CLUSTER, format!("{}{calibrated}", cluster.name)),
            ("runtime", scenario.runtime.name.clone()),
            ("sequences per step", workload.global_batch.to_string()),
            ("tokens per sequence", workload.seq_len.to_string()),
            ("precision", workload.precision.name().to_owned()),
        ]
    }

    /// The sequences of a step and the strategy of its replicas, group by group; one group if all are alike.
    #[must_use]
    pub fn shares(&self) -> Vec<(u64, &Strategy)> {
        let of = |scenario: &Scenario| scenario.workload.global_batch;
        match self {
            Self::Alike(plan) => vec![(of(&plan.scenario), &plan.strategy)],
            Self::Groups(_, together) => (together.parts.iter())
                .map(|part| (of(&part.inputs.scenario), &part.strategy))
                .collect(),
        }
    }

    /// Its strategy in the short form; those of several groups are separated by ` | `.
    #[must_use]
    pub fn written(&self) -> String {
        let runtime = &self.scenario().runtime;
        let shares = self.shares().into_iter();
        let strategies: Vec<String> = shares
            .map(|(_, strategy)| grammar::written(strategy, runtime))
            .collect();
        strategies.join(" | ")
    }

    /// Names a pipeline rank, such as `pipeline rank 1 of group 2`. In a plan with several groups
    /// `rank` counts the ranks of all groups one after the other.
    #[must_use]
    pub fn rank(&self, rank: u32) -> String {
        match self {
            Self::Alike(_) => groups::rank(&[], rank),
            Self::Groups(_, together) => groups::rank(&together.shown(), rank),
        }
    }

    /// Its layout in phrases, without final stops.
    #[must_use]
    pub fn said(&self) -> Vec<String> {
        match self {
            Self::Alike(plan) => {
                let per_node = plan.scenario.cluster.gpus_per_node;
                words::plan(&plan.strategy, per_node)
            }
            Self::Groups(_, together) => {
                let groups = together.shown();
                let all = sequences(&groups);
                let of = |group: &Group<'_>| iter::once(group.said(all)).chain(group.plan());
                groups.iter().flat_map(of).collect()
            }
        }
    }
}
