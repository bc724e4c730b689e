//! Plans as Python objects.

use std::collections::BTreeMap;
use std::path::PathBuf;

use catalog::files::{self, Kind, Replace};
use catalog::{Workload, WorkloadSizes};
use costmodel::Scenario;
use interop::export::{self, Dialect, Job, Launcher};
use plans::plan_file::PlannedFor;
use plans::{PlanFile, Prediction, Strategy};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::error::PlanError;
use crate::scenario::Inputs;

/// A plan: decisions, what they were made for, and what they were predicted to cost.
#[pyclass(frozen, module = "vescale_plan")]
pub(crate) struct Plan {
    file: PlanFile,
}

#[pymethods]
impl Plan {
    /// Reads a plan file.
    #[staticmethod]
    fn from_file(path: PathBuf) -> PyResult<Self> {
        let shown = path.display().to_string();
        let text = catalog::text::read(&path).map_err(PlanError::from)?;
        let file = PlanFile::from_yaml(&text, &shown).map_err(PlanError::from)?;
        Ok(Self { file })
    }

    /// Reads a plan file's text.
    #[staticmethod]
    fn from_yaml(text: &str) -> PyResult<Self> {
        let file = PlanFile::from_yaml(text, "plan").map_err(PlanError::from)?;
        Ok(Self { file })
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
        Ok(exported(&self.file, to, launcher, inputs)?)
    }

    /// Writes the plan file.
    fn save(&self, path: PathBuf) -> PyResult<()> {
        files::write(&path, Kind::Plan, Replace::SameKind, &self.to_yaml()?)
            .map_err(|e| PyOSError::new_err(e.to_string()))
    }

    /// The plan file's text.
    fn to_yaml(&self) -> PyResult<String> {
        Ok(self.file.to_yaml().map_err(PlanError::from)?)
    }

    /// The decisions.
    #[getter]
    fn strategy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, &serde_json::to_string(&self.file.strategy))
    }

    /// What was predicted.
    #[getter]
    fn predicted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, &serde_json::to_string(&self.file.prediction))
    }

    /// GPUs, tokens per sequence, sequences per step, precision.
    #[getter]
    fn workload<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, &serde_json::to_string(&self.file.workload))
    }

    /// Placements by name pattern.
    #[getter]
    fn sharding<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, &serde_json::to_string(&self.file.sharding))
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

    /// What `pickle` and `copy` make a plan of: its text.
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
        let scenario = &inputs.scenario;
        let planned = PlannedFor {
            model: &inputs.model,
            model_config: scenario.model.definition(),
            adapters: scenario.model.adapters,
            cluster: &inputs.cluster,
            runtime: &scenario.runtime.name,
            workload: &scenario.workload,
            headroom: scenario.headroom,
        };
        let sharding = models::sharding_section(&scenario.model, strategy, &scenario.workload)
            .map_err(|e| PlanError::Usage(e.to_string()))?;
        Ok(Self {
            file: PlanFile::of(planned, strategy, sharding, prediction),
        })
    }
}

/// The scenario that a plan file was made for.
fn scenario(file: &PlanFile) -> Result<Scenario, PlanError> {
    let w = &file.workload;
    let workload = Workload::new(WorkloadSizes {
        gpus: w.gpus,
        seq_len: w.seq_len,
        global_batch: w.global_batch,
        precision: w.precision,
    });
    let model = match &file.model_config {
        Some(config) => catalog::load::model_defined(config, &file.model, "plan")?,
        None => catalog::load::model(&file.model)?,
    };
    Ok(Scenario {
        model: model.with_adapters(file.adapters)?,
        cluster: catalog::load::cluster(&file.cluster)?,
        runtime: catalog::load::runtime(&file.runtime)?,
        workload: workload.map_err(|e| PlanError::Usage(e.to_string()))?,
        headroom: file.headroom.unwrap_or(0.0),
    })
}

fn exported(
    file: &PlanFile,
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
    let scenario = scenario(file)?;
    let strategy = plans::grammar::parse(
        &file.strategy_text,
        &scenario.model,
        &scenario.workload,
        &scenario.runtime,
    )?;
    let job = Job {
        model: &scenario.model,
        decisions: strategy.decisions(),
        workload: &scenario.workload,
        runtime: &scenario.runtime,
        sharding: &file.sharding,
        id: &file.id,
        gpus_per_node: scenario.cluster.gpus_per_node,
        inputs,
    };
    let exported = export::export(&job, dialect, launcher)?;
    let files = exported.files.into_iter();
    Ok(files.map(|file| (file.name, file.text)).collect())
}

/// JSON as a Python object.
fn object<'py>(
    py: Python<'py>,
    json: &Result<String, serde_json::Error>,
) -> PyResult<Bound<'py, PyAny>> {
    match json {
        Ok(text) => py.import("json")?.call_method1("loads", (text,)),
        Err(error) => Err(PlanError::Usage(error.to_string()).into()),
    }
}
