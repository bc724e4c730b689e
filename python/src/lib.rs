//! The Python module `vescale_plan._native`: the planner, without anything that needs PyTorch.

mod answer;
mod error;
mod plan;
mod scenario;
mod search;

use std::path::PathBuf;

use accuracy::diagnosis::Diagnosis;
use accuracy::logged_run::LoggedRun;
use answers::inputs;
use costmodel::CostModel;
use pyo3::prelude::*;

use answer::Answer;
use error::PlanError;
use plan::Plan;
use scenario::Given;
use search::Search;

/// Predicts one strategy; returns its plan.
#[pyfunction]
fn estimate(py: Python<'_>, given: Given, strategy: &str) -> PyResult<Plan> {
    let inputs = scenario::resolve(given)?;
    let s = &inputs.scenario;
    Ok(py.detach(|| -> Result<Plan, PlanError> {
        let strategy = plans::grammar::parse(strategy, &s.model, &s.workload, &s.runtime)?;
        plans::support::allowed_by(&strategy, &s.model, &s.runtime, s.workload.precision)?;
        let prediction = CostModel::new(s.clone())?.predict(&strategy)?;
        Plan::new(&inputs, &strategy, &prediction)
    })?)
}

/// Compares a training log with its plan, and explains the difference.
#[pyfunction]
fn diagnose(py: Python<'_>, log: PathBuf, plan: &Plan, warmup: Option<usize>) -> PyResult<Answer> {
    Ok(py.detach(|| -> Result<Answer, PlanError> {
        let text = catalog::text::read(&log)?;
        let run = LoggedRun::read(plan.open()?, &text, &log.display().to_string(), warmup)?;
        let found = Diagnosis::of(&run)?;
        let notes = run.notes().into_iter();
        let notes: String = notes.map(|note| format!("note: {note}\n")).collect();
        Answer::new(notes + &found.text(), &found.document(None))
    })?)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CLUSTER", inputs::DEFAULT_CLUSTER)?;
    module.add("HEADROOM", inputs::DEFAULT_HEADROOM)?;
    module.add_class::<Answer>()?;
    module.add_class::<Plan>()?;
    module.add_class::<Search>()?;
    module.add_function(wrap_pyfunction!(diagnose, module)?)?;
    module.add_function(wrap_pyfunction!(estimate, module)?)
}
