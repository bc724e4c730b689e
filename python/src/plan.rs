//! Plans as Python objects.

use std::path::PathBuf;

use catalog::files::{self, Kind, Replace};
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
        format!(
            "Plan({}, {}, {} x {}, {:.4} s per step)",
            self.file.model,
            self.file.strategy_text,
            self.file.workload.gpus,
            self.file.cluster,
            self.file.prediction.step_time_s
        )
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
