//! The ways to use the pools of a cluster: each is a question of its own, on some of the pools in one order.

use catalog::Seconds;
use costmodel::Scenario;
use planner::{Constraints, PlannerError};
use reports::format;
use reports::lines::Style;
use serde::Serialize;

use crate::inputs::{Inputs, InputsJson};

/// One way to use pools, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The pools that are used, in the order of the pipeline.
    pub cluster: String,
    /// Their number of GPUs.
    pub gpus: u64,
    /// Seconds per step of the best plan on them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_time_s: Option<f64>,
    /// Why there is no plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_none: Option<String>,
}

impl Tried {
    /// The question on some pools, of which nothing is known yet.
    pub(crate) fn new(inputs: &Inputs) -> Self {
        Self {
            cluster: inputs.cluster_arg.clone(),
            gpus: inputs.json.gpus,
            step_time_s: None,
            why_none: None,
        }
    }
}

/// The question on each arrangement of the cluster's pools: first on all of them. None if all nodes are alike.
#[must_use]
pub fn questions(inputs: &Inputs) -> Vec<Inputs> {
    let Some(pools) = &inputs.scenario.cluster.pools else {
        return Vec::new();
    };
    let on = |pool: catalog::Pool| {
        let whole = &inputs.scenario;
        let scenario = Scenario {
            cluster: pool.cluster,
            workload: whole.workload.with_gpus(pool.gpus).ok()?,
            ..whole.clone()
        };
        Some(Inputs {
            json: InputsJson::of(&scenario, inputs.json.parameters),
            scenario,
            model_arg: inputs.model_arg.clone(),
            cluster_arg: pool.arg,
        })
    };
    pools.arrangements().into_iter().filter_map(on).collect()
}

/// Refuses constraints with values that no strategy can have. On a cluster of several pools, a value need be legal on one
/// arrangement of them only.
///
/// # Errors
/// The first such constraint, with the legal values and the nearest.
pub fn check(inputs: &Inputs, constraints: &Constraints) -> Result<(), PlannerError> {
    let legal = |scenario: &Scenario| {
        planner::legal_values::check(scenario, &[scenario.workload.gpus], constraints)
    };
    let arrangements = questions(inputs);
    let mut checked = arrangements.iter().map(|pools| legal(&pools.scenario));
    match checked.next() {
        None => legal(&inputs.scenario),
        Some(first) => first.or_else(|wrong| match checked.any(|legal| legal.is_ok()) {
            true => Ok(()),
            false => Err(wrong),
        }),
    }
}

/// The ways to use the pools as lines for people.
#[must_use]
pub fn text(tried: &[Tried], style: Style) -> String {
    let mut text = style.heading("Ways to use the pools");
    let rows: Vec<(String, String)> = tried
        .iter()
        .map(|row| {
            let time = row.step_time_s.map(|s| format::seconds(Seconds(s)));
            let why = row.why_none.clone().unwrap_or_default();
            (row.cluster.clone(), time.unwrap_or(why))
        })
        .collect();
    let rows: Vec<(&str, String)> = rows
        .iter()
        .map(|(name, s)| (&name[..], s.clone()))
        .collect();
    text.push_str(&style.pairs(&rows));
    text
}
