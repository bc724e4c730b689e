//! The Python module `vescale_plan._native`: the planner, without anything that needs PyTorch.

mod error;
mod plan;
mod scenario;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use costmodel::CostModel;
use planner::{Constraints, Objective, SearchOptions, SearchSpace};
use pyo3::prelude::*;

use error::PlanError;
use plan::Plan;
use scenario::{Given, Inputs};

/// How often a running search looks for Ctrl-C.
const SIGNALS_EVERY: Duration = Duration::from_millis(20);

/// The best plan of a search.
#[pyfunction]
#[pyo3(signature = (given, fix, bounds, forbid, objective, top))]
fn search(
    py: Python<'_>,
    given: Given,
    fix: Vec<String>,
    bounds: (Vec<String>, Vec<String>),
    forbid: Vec<String>,
    objective: &str,
    top: usize,
) -> PyResult<Vec<Plan>> {
    let inputs = Inputs::resolve(given)?;
    let (at_least, at_most) = bounds;
    let constraints =
        Constraints::parse(&fix, &at_least, &at_most, &forbid).map_err(PlanError::from)?;
    let scenario = &inputs.scenario;
    planner::legal_values::check(scenario, &[scenario.workload.gpus], &constraints)
        .map_err(PlanError::from)?;
    let objective = match objective {
        "time" => Objective::Time,
        "memory" => Objective::Memory,
        other => {
            let message = format!("objective {other}: expected time or memory");
            return Err(PlanError::Usage(message).into());
        }
    };
    let cancelled = AtomicBool::new(false);
    let run = || -> Result<Vec<Plan>, PlanError> {
        let costs = CostModel::new(inputs.scenario.clone())?;
        let space = SearchSpace::new(&inputs.scenario, &constraints);
        let options = SearchOptions {
            objective,
            top,
            cancelled: Some(&cancelled),
            ..SearchOptions::default()
        };
        let outcome = planner::search(&costs, &space, &options, &|_| {})?;
        if outcome.top.is_empty() {
            return Err(nothing_fits(&costs, &constraints, &options));
        }
        let found = outcome.top.iter();
        found
            .map(|f| Plan::new(&inputs, &f.strategy, &f.prediction))
            .collect()
    };
    let found = std::thread::scope(|scope| {
        let searching = scope.spawn(run);
        let mut interrupted = None;
        while !searching.is_finished() {
            py.detach(|| std::thread::sleep(SIGNALS_EVERY));
            if let Err(signal) = py.check_signals() {
                cancelled.store(true, Ordering::Relaxed);
                interrupted = Some(signal);
            }
        }
        match interrupted {
            Some(signal) => Err(signal),
            None => match searching.join() {
                Ok(result) => result.map_err(PyErr::from),
                Err(panic) => std::panic::resume_unwind(panic),
            },
        }
    })?;
    Ok(found)
}

/// What one strategy costs.
#[pyfunction]
fn estimate(py: Python<'_>, given: Given, strategy: &str) -> PyResult<Plan> {
    let inputs = Inputs::resolve(given)?;
    let s = &inputs.scenario;
    let plan = py.detach(|| -> Result<Plan, PlanError> {
        let strategy = plans::grammar::parse(strategy, &s.model, &s.workload, &s.runtime)?;
        plans::legality::allowed_by(&strategy, &s.model, &s.runtime, s.workload.precision)?;
        let prediction = CostModel::new(s.clone())?.predict(&strategy)?;
        Plan::new(&inputs, &strategy, &prediction)
    })?;
    Ok(plan)
}

/// Why there is no plan, with what would make one possible.
fn nothing_fits(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> PlanError {
    let nothing = "no plan fits under these constraints".to_owned();
    match planner::size::relaxations(costs, constraints, options) {
        Ok(ways) if ways.is_empty() => PlanError::Usage(nothing),
        Ok(ways) => PlanError::Usage(format!("{nothing}; {}", ways.join("; "))),
        Err(error) => error.into(),
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Plan>()?;
    module.add_function(wrap_pyfunction!(search, module)?)?;
    module.add_function(wrap_pyfunction!(estimate, module)?)
}
