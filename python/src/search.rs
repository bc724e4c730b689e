//! A search for plans, as a Python object: it runs when plans are asked for, and prices each block once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use answers::{Inputs, arrangements};
use costmodel::CostModel;
use planner::{Constraints, Objective, SearchOptions};
use plans::{Candidate, Relaxation};
use pyo3::prelude::*;

use crate::error::PlanError;
use crate::plan::Plan;
use crate::scenario::{self, Given};

/// How often a running search looks for Ctrl-C.
const SIGNALS_EVERY: Duration = Duration::from_millis(20);

/// A search that was asked for: model, cluster, constraints and objective.
#[pyclass(frozen, module = "vescale_plan._native")]
pub(crate) struct Search {
    inputs: Inputs,
    constraints: Constraints,
    objective: Objective,
    /// Prices strategies. `None` on a cluster of several pools, where the search prices every arrangement by itself.
    costs: Option<Arc<CostModel>>,
}

#[pymethods]
impl Search {
    #[new]
    fn new(
        given: Given,
        fix: Vec<String>,
        bounds: (Vec<String>, Vec<String>),
        forbid: Vec<String>,
        objective: &str,
    ) -> PyResult<Self> {
        let inputs = scenario::resolve(given)?;
        let (at_least, at_most) = bounds;
        let constraints =
            Constraints::parse(&fix, &at_least, &at_most, &forbid).map_err(PlanError::from)?;
        let scenario = &inputs.scenario;
        arrangements::check(&inputs, &constraints).map_err(PlanError::from)?;
        let objective = match objective {
            "time" => Objective::Time,
            "memory" => Objective::Memory,
            other => {
                let message = format!("objective {other}: expected time or memory");
                return Err(PlanError::Usage(message).into());
            }
        };
        let costs = match scenario.cluster.pools {
            None => Some(Arc::new(
                CostModel::new(scenario.clone()).map_err(PlanError::from)?,
            )),
            Some(_) => None,
        };
        Ok(Self {
            inputs,
            constraints,
            objective,
            costs,
        })
    }

    /// The best plans, the best first: `count` of them, or all that fit.
    fn first(&self, py: Python<'_>, count: usize) -> PyResult<Vec<Plan>> {
        let cancelled = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let searching = scope.spawn(|| self.run(count, &cancelled));
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
        })
    }
}

impl Search {
    fn run(&self, count: usize, cancelled: &AtomicBool) -> Result<Vec<Plan>, PlanError> {
        let Self {
            inputs,
            constraints,
            objective,
            costs,
        } = self;
        let search = answers::Search {
            constraints,
            options: SearchOptions {
                objective: *objective,
                top: count,
                cancelled: Some(cancelled),
                ..SearchOptions::default()
            },
            by_cost: false,
            in_use: None,
            compared: None,
            progress: &|_| {},
        };
        let answer = search.find(inputs, || match costs {
            Some(costs) => Ok(Arc::clone(costs)),
            None => CostModel::new(inputs.scenario.clone()).map(Arc::new),
        })?;
        let plans = &answer.outcome.top;
        if plans.is_empty() {
            return Err(nothing_fits(&answer.outcome.relax));
        }
        if let Some(together) = &answer.together {
            return Ok(vec![Plan::unsaved(together.plan()?)]);
        }
        let plan =
            |found: &Candidate| Plan::new(&answer.inputs, &found.strategy, &found.prediction);
        plans.iter().map(plan).collect()
    }
}

/// Why there is no plan, with what would make one possible.
fn nothing_fits(ways: &[Relaxation]) -> PlanError {
    let nothing = "no plan fits under these constraints";
    PlanError::Usage(match ways {
        [] => nothing.to_owned(),
        ways => {
            let ways: Vec<&str> = ways.iter().map(|way| way.says.as_str()).collect();
            format!("{nothing}; {}", ways.join("; "))
        }
    })
}
