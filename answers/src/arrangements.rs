//! The ways to use the pools of a cluster: each is a question of its own, on some of the pools in one order.

use catalog::{Pool, Seconds, Workload};
use costmodel::Scenario;
use planner::{Constraints, Objective, PlannerError};
use reports::format;
use reports::lines::Style;
use serde::Serialize;

use crate::inputs::{Inputs, InputsJson};

/// One way to use pools, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The pools that are used. A pipeline passes in turn through pools separated by ` + `. Pools
    /// separated by ` | ` have groups of replicas of their own, which train side by side.
    pub cluster: String,
    /// Number of GPUs of these pools.
    pub gpus: u64,
    /// Seconds per step of the best plan on them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_time_s: Option<f64>,
    /// Why there is no plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_none: Option<String>,
}

impl Tried {
    /// A division of pools into groups side by side, not searched yet.
    pub(crate) fn divided(cluster: String, gpus: u64) -> Self {
        Self {
            cluster,
            gpus,
            step_time_s: None,
            why_none: None,
        }
    }

    /// The arrangement of pools that `inputs` is about, not searched yet.
    pub(crate) fn new(inputs: &Inputs) -> Self {
        Self::divided(inputs.cluster_arg.clone(), inputs.json.gpus)
    }
}

/// Why no plan is shown for a way to use pools: `stopped` if its search was. `better_by` is the
/// objective by which a known other way is better; `None` if no other is known.
pub(crate) fn why_none(stopped: bool, better_by: Option<Objective>) -> String {
    let why = match (stopped, better_by) {
        (true, _) => "not searched to the end",
        (false, Some(Objective::Time)) => "no faster than the best",
        (false, Some(Objective::Memory)) => "no lighter than the best",
        (false, None) => "no plan fits",
    };
    why.to_owned()
}

/// The question on each arrangement of the cluster's pools, all pools first. Empty without pools.
#[must_use]
pub fn questions(inputs: &Inputs) -> Vec<Inputs> {
    let Some(pools) = &inputs.scenario.cluster.pools else {
        return Vec::new();
    };
    let on = |pool: Pool| {
        let workload = inputs.scenario.workload.with_gpus(pool.gpus).ok()?;
        Some(on_pool(inputs, &pool, workload))
    };
    pools.arrangements().into_iter().filter_map(on).collect()
}

/// The question on another cluster, with another number of GPUs or batch.
#[must_use]
pub fn on_pool(inputs: &Inputs, pool: &Pool, workload: Workload) -> Inputs {
    let scenario = Scenario {
        cluster: pool.cluster.clone(),
        workload,
        ..inputs.scenario.clone()
    };
    Inputs {
        json: InputsJson::of(&scenario, inputs.json.parameters),
        scenario,
        model_arg: inputs.model_arg.clone(),
        cluster_arg: pool.arg.clone(),
    }
}

/// Refuses constraints with values that no strategy can have. On a cluster of several pools, a value need be legal on one
/// arrangement of them only.
///
/// # Errors
/// The first such constraint, with the legal values and the nearest.
pub fn check(inputs: &Inputs, constraints: &Constraints) -> Result<(), PlannerError> {
    let arrangements = questions(inputs);
    let divisions = inputs.scenario.cluster.pools.as_ref();
    let divisions = divisions.map_or_else(Vec::new, |pools| pools.divisions());
    let most = divisions.iter().map(Vec::len).max().unwrap_or(1) as u64;
    // The number of groups of replicas is limited by the pools, not by a strategy.
    let constraints = &planner::legal_values::of_each_group(constraints, most)?;
    let legal = |scenario: &Scenario| {
        planner::legal_values::check(scenario, &[scenario.workload.gpus], constraints)
    };
    let mut checked = arrangements.iter().map(|pools| legal(&pools.scenario));
    match checked.next() {
        None => legal(&inputs.scenario),
        Some(first) => first.or_else(|wrong| match checked.any(|legal| legal.is_ok()) {
            true => Ok(()),
            false => Err(wrong),
        }),
    }
}

/// The ways to use the pools, each with its step time, or why there is no plan.
pub(crate) fn rows(tried: &[Tried]) -> Vec<(&str, String)> {
    let row = |way: &Tried| {
        let time = way.step_time_s.map(|s| format::seconds(Seconds(s)));
        time.or_else(|| way.why_none.clone()).unwrap_or_default()
    };
    tried
        .iter()
        .map(|way| (&way.cluster[..], row(way)))
        .collect()
}

/// The ways to use the pools as lines for people.
#[must_use]
pub fn text(tried: &[Tried], style: Style) -> String {
    style.heading("Ways to use the pools") + &style.pairs(&rows(tried))
}
