//! The search for the best plan. On a cluster of several pools it searches each way to use some of them and keeps the best
//! plan of all.

use std::sync::Arc;

use costmodel::{CostError, CostModel};
use planner::{Constraints, Objective, PlannerError, SearchOptions, SearchSpace};
use plans::{Candidate, Present, SearchOutcome, Strategy};

use crate::arrangements::{self, Tried};
use crate::error::AnswerError;
use crate::inputs::Inputs;

/// What a search looks for.
#[derive(Clone, Copy)]
pub struct Search<'a> {
    /// Restrictions on plans (`--fix`, `--min`, `--max`, `--forbid`).
    pub constraints: &'a Constraints,
    /// What is minimised, and how many plans are wanted.
    pub options: SearchOptions<'a>,
    /// Whether ways to use the pools of a cluster are compared by the dollars of a step, not by its time.
    pub by_cost: bool,
    /// The strategy in use, if there is one: it is compared with the best plan.
    pub in_use: Option<&'a Strategy>,
    /// Receives the share of the search that is done, in `[0, 1]`.
    pub progress: &'a (dyn Fn(f64) + Sync),
}

/// What a search found.
pub struct Answer {
    /// The question. On a cluster of several pools it is asked of the pools that the best plan uses, in the order of the
    /// pipeline.
    pub inputs: Inputs,
    /// The cost model of `inputs`.
    pub costs: Arc<CostModel>,
    /// The restrictions on plans under which was searched.
    pub constraints: Constraints,
    /// The strategies that were searched.
    pub space: SearchSpace,
    /// The best plans, and how many strategies were ruled out by which bound.
    pub outcome: SearchOutcome,
    /// The strategy in use beside the best plan, if there is one.
    pub compared: Option<Present>,
    /// The ways to use the pools of the cluster that were searched; empty if all of its nodes are alike.
    pub tried: Vec<Tried>,
}

impl Search<'_> {
    /// Finds the best plan. If no plan fits, the answer lists changes that would make one possible. `costs` makes the cost
    /// model of the whole cluster; it is not called if some arrangement of the cluster's pools has a plan.
    ///
    /// # Errors
    /// When the GPU cannot compute in the precision asked for, when a measured profile lacks a kernel or message of the
    /// model, or when an exhaustive search has too many strategies.
    pub fn find(
        &self,
        inputs: &Inputs,
        costs: impl FnOnce() -> Result<Arc<CostModel>, CostError>,
    ) -> Result<Answer, AnswerError> {
        let (best, tried) = self.search_each(arrangements::questions(inputs))?;
        if let Some(best) = best {
            return Ok(Answer { tried, ..best });
        }
        let mut answer = self.search_one(inputs.clone(), costs()?, self.progress)?;
        let (costs, outcome) = (&answer.costs, &mut answer.outcome);
        if outcome.top.is_empty() && !outcome.interrupted {
            outcome.relax = planner::size::relaxations(costs, self.constraints, &self.options)?;
        }
        let best = outcome.top.first().map(|best| &best.strategy);
        let compare =
            |now| planner::present::compare(costs, self.constraints, &self.options, now, best);
        answer.compared = self.in_use.map(compare).transpose()?;
        Ok(Answer { tried, ..answer })
    }

    /// Searches one cluster.
    fn search_one(
        &self,
        inputs: Inputs,
        costs: Arc<CostModel>,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Result<Answer, PlannerError> {
        let scenario = costs.scenario();
        let space = match self.in_use {
            Some(now) => SearchSpace::with_present(scenario, self.constraints, now),
            None => SearchSpace::new(scenario, self.constraints),
        };
        let outcome = planner::search(&costs, &space, &self.options, progress)?;
        Ok(Answer {
            inputs,
            costs,
            constraints: self.constraints.clone(),
            space,
            outcome,
            compared: None,
            tried: Vec::new(),
        })
    }

    /// Searches every arrangement of pools, and keeps the answer with the best plan; `None` if no arrangement has a plan.
    fn search_each(
        &self,
        arrangements: Vec<Inputs>,
    ) -> Result<(Option<Answer>, Vec<Tried>), AnswerError> {
        let count = arrangements.len() as f64;
        let mut best: Option<(f64, Answer)> = None;
        let mut tried = Vec::new();
        for (done, inputs) in arrangements.into_iter().enumerate() {
            let progress = |share: f64| (self.progress)((done as f64 + share) / count);
            let mut row = Tried::new(&inputs);
            let answer = CostModel::new(inputs.scenario.clone())
                .map_err(PlannerError::from)
                .and_then(|costs| self.search_one(inputs, Arc::new(costs), &progress));
            let mut interrupted = false;
            match answer {
                Err(error @ PlannerError::TooLarge { .. }) => return Err(error.into()),
                Err(error) => row.why_none = Some(error.to_string()),
                Ok(answer) => {
                    interrupted = answer.outcome.interrupted;
                    match answer.outcome.top.first() {
                        None => row.why_none = Some("no plan fits".to_owned()),
                        Some(plan) => {
                            row.step_time_s = Some(plan.prediction.step_time.0);
                            let value = self.value(&answer.inputs, plan);
                            if best.as_ref().is_none_or(|(least, _)| value < *least) {
                                best = Some((value, answer));
                            }
                        }
                    }
                }
            }
            tried.push(row);
            if interrupted {
                break;
            }
        }
        Ok((best.map(|(_, best)| best), tried))
    }

    /// The number by which plans on different pools are compared; smaller is better. It is the step time, the dollars of a
    /// step, or the peak memory as a share of what a device has.
    fn value(&self, inputs: &Inputs, plan: &Candidate) -> f64 {
        let p = &plan.prediction;
        match self.options.objective {
            Objective::Memory => p.peak_memory.as_f64() / p.usable().as_f64(),
            Objective::Time if self.by_cost => {
                let dollars = inputs.scenario.cluster.dollars_per_gpu_hour.as_ref();
                let rate = dollars.map_or(1.0, |price| price.value) * inputs.json.gpus as f64;
                rate * p.step_time.0
            }
            Objective::Time => p.step_time.0,
        }
    }
}
