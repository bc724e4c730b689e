//! Searches on a cluster of several pools: each way to use some of the pools is a question of its own, and the best of
//! their answers is the answer.

use catalog::Seconds;
use costmodel::{CostModel, Scenario};
use planner::{Constraints, Objective, PlannerError, SearchOptions, SearchSpace};
use plans::{Candidate, SearchOutcome};
use reports::format;
use reports::lines::Style;
use serde::Serialize;

use crate::error::AnswerError;
use crate::inputs::{Inputs, InputsJson};

/// The best way to use the pools.
pub struct Best {
    /// The question on the pools that are used, in the order of the pipeline.
    pub inputs: Inputs,
    /// What strategies cost on them.
    pub costs: CostModel,
    /// What was found.
    pub outcome: SearchOutcome,
}

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

/// The question on each arrangement of the cluster's pools: first on all of them. None if all nodes are alike.
#[must_use]
pub fn of(inputs: &Inputs) -> Vec<Inputs> {
    let Some(pools) = &inputs.scenario.cluster.pools else {
        return Vec::new();
    };
    let on = |pool: catalog::Pool| {
        let whole = &inputs.scenario;
        let scenario = Scenario {
            cluster: pool.cluster,
            workload: whole.workload.on(pool.gpus).ok()?,
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

/// Searches every arrangement, and keeps the one whose best plan has the least `measure`; `None` if no arrangement has a
/// plan. `progress` receives the share done, in `[0, 1]`.
///
/// # Errors
/// When an exhaustive search is too large.
pub fn search(
    arrangements: Vec<Inputs>,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
    measure: impl Fn(&Inputs, &Candidate) -> f64,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<(Option<Best>, Vec<Tried>), AnswerError> {
    let count = arrangements.len() as f64;
    let mut best: Option<(f64, Best)> = None;
    let mut tried = Vec::new();
    for (done, inputs) in arrangements.into_iter().enumerate() {
        let share = |share: f64| progress((done as f64 + share) / count);
        let mut row = Tried {
            cluster: inputs.cluster_arg.clone(),
            gpus: inputs.json.gpus,
            step_time_s: None,
            why_none: None,
        };
        let found = CostModel::new(inputs.scenario.clone())
            .map_err(PlannerError::from)
            .and_then(|costs| {
                let space = SearchSpace::new(costs.scenario(), constraints);
                let outcome = planner::search(&costs, &space, options, &share)?;
                Ok((costs, outcome))
            });
        match found {
            Err(error @ PlannerError::TooLarge { .. }) => return Err(error.into()),
            Err(error) => row.why_none = Some(error.to_string()),
            Ok((costs, outcome)) => {
                let interrupted = outcome.interrupted;
                match outcome.top.first() {
                    None => row.why_none = Some("no plan fits".to_owned()),
                    Some(plan) => {
                        row.step_time_s = Some(plan.prediction.step_time.0);
                        let value = measure(&inputs, plan);
                        if best.as_ref().is_none_or(|(least, _)| value < *least) {
                            let found = Best {
                                inputs,
                                costs,
                                outcome,
                            };
                            best = Some((value, found));
                        }
                    }
                }
                if interrupted {
                    tried.push(row);
                    break;
                }
            }
        }
        tried.push(row);
    }
    Ok((best.map(|(_, best)| best), tried))
}

/// The number by which an objective compares plans of different clusters; smaller is better: the step time in seconds, or
/// the peak memory as a share of what a device has.
#[must_use]
pub fn measure(objective: Objective, plan: &Candidate) -> f64 {
    let p = &plan.prediction;
    match objective {
        Objective::Time => p.step_time.0,
        Objective::Memory => p.peak_memory.as_f64() / p.usable().as_f64(),
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
