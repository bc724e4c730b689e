//! Answers to questions about a plan, as Python objects.

use pyo3::prelude::*;
use reports::lines::Style;
use serde::Serialize;

use crate::error::PlanError;

/// How answers are laid out: wide enough for a notebook, without a terminal's colours.
pub(crate) const STYLE: Style = Style {
    width: 100,
    colour: false,
};

/// An answer, as the command line gives it: text for people, and the document that `--json` prints.
#[pyclass(frozen, module = "vescale_plan")]
pub(crate) struct Answer {
    text: String,
    json: String,
}

impl Answer {
    pub(crate) fn new(text: String, document: &impl Serialize) -> Result<Self, PlanError> {
        let json = serde_json::to_string(document).map_err(|e| PlanError::Usage(e.to_string()))?;
        Ok(Self { text, json })
    }
}

#[pymethods]
impl Answer {
    /// The answer as a dictionary.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, &self.json)
    }

    fn __repr__(&self) -> &str {
        &self.text
    }

    fn _repr_html_(&self) -> String {
        reports::html::fragment::text(&self.text)
    }
}

/// JSON as a Python object.
pub(crate) fn object<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (json,))
}
