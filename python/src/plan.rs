//! Plans as Python objects.

use std::collections::BTreeMap;
use std::path::PathBuf;

use answers::explanation::{self, OfGroups};
use answers::{Inputs, Opened, Planned, Training, comparison, opened, report};
use catalog::files::{self, Kind, Replace};
use interop::export::{self, Dialect, Job, Launcher};
use plans::{PlanFile, Prediction, Strategy};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use serde::Serialize;

use crate::answer::{Answer, STYLE, object};
use crate::error::{PlanError, in_python};

/// A plan: decisions, what they were made for, and what they were predicted to cost.
#[pyclass(frozen, module = "vescale_plan")]
pub(crate) struct Plan {
    file: PlanFile,
    /// Where it was read from, or [`UNSAVED`].
    path: PathBuf,
}

/// Name that commands give to the file of a plan that was not read from one.
const UNSAVED: &str = "plan.yaml";

#[pymethods]
impl Plan {
    /// Reads a plan file.
    #[staticmethod]
    fn from_file(path: PathBuf) -> PyResult<Self> {
        let file = opened::read(&path).map_err(PlanError::from)?;
        Ok(Self { file, path })
    }

    /// Reads a plan file's text.
    #[staticmethod]
    fn from_yaml(text: &str) -> PyResult<Self> {
        let file = PlanFile::from_yaml(text, "plan").map_err(PlanError::from)?;
        Ok(Self::unsaved(file))
    }

    /// The files of an export, by name: the plan in a training system's own configuration.
    #[pyo3(signature = (to, *, launcher=None, tokenizer=None, data=None, hf_id=None))]
    fn export(
        &self,
        to: &str,
        launcher: Option<&str>,
        tokenizer: Option<&str>,
        data: Option<&str>,
        hf_id: Option<&str>,
    ) -> PyResult<BTreeMap<String, String>> {
        let inputs = export::Inputs {
            tokenizer,
            data,
            hf_id,
        };
        Ok(exported(self, to, launcher, inputs)?)
    }

    /// Where time and memory go, and what changing one decision does; `why_not` is another strategy to compare with.
    #[pyo3(signature = (*, why_not=None))]
    fn explain(&self, py: Python<'_>, why_not: Option<&str>) -> PyResult<Answer> {
        Ok(py.detach(|| -> Result<Answer, PlanError> {
            match (self.planned()?, why_not) {
                (Planned::Alike(plan), _) => {
                    let explained = explanation::explain(&plan, why_not)?;
                    Answer::new(explained.text(STYLE), &explained.document())
                }
                (Planned::Groups(file, together), None) => {
                    let (file, together) = (&file, &together);
                    let explained = OfGroups { file, together };
                    Answer::new(explained.text(STYLE), &explained.document())
                }
                (Planned::Groups(..), Some(_)) => {
                    let message = "why_not: the plan has several groups of replicas; expected \
                                   one of its groups, such as plan.group(1)";
                    Err(PlanError::Usage(message.to_owned()))
                }
            }
        })?)
    }

    /// Compares this plan with another, part by part.
    fn compare(&self, py: Python<'_>, other: &Self) -> PyResult<Answer> {
        Ok(py.detach(|| -> Result<Answer, PlanError> {
            let compared = comparison::compare(&self.planned()?, &other.planned()?)?;
            let text = compared.text(["this", "other"], STYLE);
            Answer::new(text, &compared.document())
        })?)
    }

    /// Writes the HTML report.
    fn report(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let html = py.detach(|| -> Result<String, PlanError> {
            let on = |cluster| Training::on(cluster, None, None);
            Ok(match self.planned()? {
                Planned::Alike(plan) => {
                    report::of_plan(&plan, &self.path, on(&plan.scenario.cluster))?
                }
                Planned::Groups(file, together) => {
                    let training = on(&together.inputs.scenario.cluster);
                    report::of_plan_of_groups(&file, &together, &self.path, training)?
                }
            })
        })?;
        files::write(&path, Kind::Report, Replace::SameKind, &html).map_err(not_written)
    }

    fn _repr_html_(&self) -> String {
        reports::html::fragment::plan(&self.file)
    }

    /// Writes the plan file.
    fn save(&self, path: PathBuf) -> PyResult<()> {
        files::write(&path, Kind::Plan, Replace::SameKind, &self.to_yaml()?).map_err(not_written)
    }

    /// The plan file's text.
    fn to_yaml(&self) -> PyResult<String> {
        Ok(self.file.to_yaml().map_err(PlanError::from)?)
    }

    /// The decisions.
    #[getter]
    fn strategy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        part(py, &self.file.strategy)
    }

    /// The groups of replicas, where not all replicas are alike: each with its cluster, GPUs, share of the batch, strategy
    /// and prediction. Empty if all are alike.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        part(py, &self.file.groups)
    }

    /// The plan of one of the groups, counted from 1: a job on the group's pools with its share of the batch.
    fn group(&self, number: i64) -> PyResult<Self> {
        let path = PathBuf::from(format!("{}#{number}", self.path.display()));
        let found = usize::try_from(number).ok();
        match found.and_then(|number| self.file.of_group(number)) {
            Some(file) => Ok(Self { file, path }),
            None => {
                let message = match self.file.groups.len() {
                    0 => "all replicas of the plan are alike: it has no groups".to_owned(),
                    groups => format!("group {number}; expected 1 to {groups}"),
                };
                Err(PlanError::Usage(message).into())
            }
        }
    }

    /// What was predicted.
    #[getter]
    fn predicted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        part(py, &self.file.prediction)
    }

    /// GPUs, tokens per sequence, sequences per step, precision.
    #[getter]
    fn workload<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        part(py, &self.file.workload)
    }

    /// Placements by name pattern.
    #[getter]
    fn sharding<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        part(py, &self.file.sharding)
    }

    /// The decisions on one line, as `estimate` and the command line take them.
    #[getter]
    fn strategy_text(&self) -> &str {
        &self.file.strategy_text
    }

    /// Content hash of the decisions.
    #[getter]
    fn id(&self) -> &str {
        &self.file.id
    }

    /// Model preset or path.
    #[getter]
    fn model(&self) -> &str {
        &self.file.model
    }

    /// Cluster preset or path.
    #[getter]
    fn cluster(&self) -> &str {
        &self.file.cluster
    }

    /// Runtime preset.
    #[getter]
    fn runtime(&self) -> &str {
        &self.file.runtime
    }

    fn __repr__(&self) -> String {
        let (s, w) = (&self.file.strategy, &self.file.workload);
        if !self.file.groups.is_empty() {
            return format!(
                "Plan({:?}, gpus={}, groups={}, step_time_s={:.4}, id={:?})",
                self.file.model,
                w.gpus,
                self.file.groups.len(),
                self.file.prediction.step_time_s,
                self.file.id,
            );
        }
        format!(
            "Plan({:?}, gpus={}, tp={}, pp={}, cp={}, ep={}, dp={}, zero={}, step_time_s={:.4}, id={:?})",
            self.file.model,
            w.gpus,
            s.tp,
            s.pp,
            s.cp,
            s.ep,
            s.dp_shard * s.dp_replicate,
            u8::from(s.zero),
            self.file.prediction.step_time_s,
            self.file.id,
        )
    }

    fn __hash__(&self) -> u64 {
        // Equal plans have equal ids: 16 hexadecimal digits.
        u64::from_str_radix(&self.file.id, 16).unwrap_or_default()
    }

    /// Lets `pickle` and `copy` make a plan again from its text.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        let make = py.get_type::<Self>().getattr("from_yaml")?;
        Ok((make, (self.to_yaml()?,)))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.file == other.file
    }
}

impl Plan {
    pub(crate) fn new(
        inputs: &Inputs,
        strategy: &Strategy,
        prediction: &Prediction,
    ) -> Result<Self, PlanError> {
        let file = answers::plan::file(inputs, strategy, prediction)?;
        Ok(Self::unsaved(file))
    }

    /// A plan that is not in a file yet.
    pub(crate) fn unsaved(file: PlanFile) -> Self {
        Self {
            file,
            path: PathBuf::from(UNSAVED),
        }
    }

    /// The plan with all of its groups.
    fn planned(&self) -> Result<Planned, PlanError> {
        Ok(Planned::of(self.file.clone(), &self.path)?)
    }

    /// The plan with its scenario rebuilt; an error if it has several groups of replicas.
    pub(crate) fn open(&self) -> Result<Opened, PlanError> {
        if !self.file.groups.is_empty() {
            let message = format!(
                "the plan has {} groups of replicas, each with a strategy of its own; expected one of them, such as plan.group(1)",
                self.file.groups.len()
            );
            return Err(PlanError::Usage(message));
        }
        Ok(Opened::of(self.file.clone(), &self.path)?)
    }
}

/// The exception for a file that cannot be written.
fn not_written(error: impl std::fmt::Display) -> PyErr {
    PyOSError::new_err(in_python(&error.to_string()))
}

fn exported(
    plan: &Plan,
    to: &str,
    launcher: Option<&str>,
    inputs: export::Inputs<'_>,
) -> Result<BTreeMap<String, String>, PlanError> {
    let launcher = match launcher {
        None => None,
        Some("torchrun") => Some(Launcher::Torchrun),
        Some("slurm") => Some(Launcher::Slurm),
        Some("kubernetes") => Some(Launcher::Kubernetes),
        Some(other) => {
            let message = format!("launcher {other}: expected torchrun, slurm or kubernetes");
            return Err(PlanError::Usage(message));
        }
    };
    let dialect = Dialect::parse(to)?;
    let plan = plan.open()?;
    let (file, strategy) = (&plan.file, &plan.strategy);
    let scenario = plan.costs.scenario();
    let job = Job {
        model: &scenario.model,
        decisions: strategy.decisions(),
        workload: &scenario.workload,
        runtime: &scenario.runtime,
        sharding: &file.sharding,
        id: &file.id,
        cluster: &scenario.cluster,
        inputs,
    };
    let exported = export::export(&job, dialect, launcher)?;
    let files = exported.files.into_iter();
    Ok(files.map(|file| (file.name, file.text)).collect())
}

/// A part of a plan file as a Python object.
fn part<'py>(py: Python<'py>, part: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let json = serde_json::to_string(part).map_err(|e| PlanError::Usage(e.to_string()))?;
    object(py, &json)
}
