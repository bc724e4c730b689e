//! The search for the best plan. On a cluster of several pools it searches each way to use some of them and keeps the best
//! plan of all.

use std::sync::Arc;

use costmodel::{CostError, CostModel};
use planner::{Constraints, Objective, PlannerError, SearchOptions, SearchSpace};
use plans::present::OnPools;
use plans::{Candidate, PlanFile, Present, SearchOutcome, SpaceReport, Strategy};

use crate::arrangements::{self, Tried};
use crate::error::AnswerError;
use crate::inputs::Inputs;
use crate::other_runtimes;
use crate::plan;
use crate::together::{Divisions, Together};

/// The parameters of a search.
#[derive(Clone, Copy)]
pub struct Search<'a> {
    /// Restrictions on plans (`--fix`, `--min`, `--max`, `--forbid`).
    pub constraints: &'a Constraints,
    /// The objective, and how many plans are wanted.
    pub options: SearchOptions<'a>,
    /// Whether ways to use the pools of a cluster are compared by the dollars of a step, not by its time.
    pub by_cost: bool,
    /// The strategy in use, if any; its values are tried too, even outside the usual ranges.
    pub in_use: Option<&'a Strategy>,
    /// The strategy in use to compare with the best plan, if there is one.
    pub compared: Option<Now<'a>>,
    /// Receives the share of the search that is done, in `[0, 1]`.
    pub progress: &'a (dyn Fn(f64) + Sync),
}

/// The strategy, or groups of replicas, that a team trains with now.
#[derive(Clone, Copy)]
pub enum Now<'a> {
    /// A strategy whose replicas are all alike, with the question for the devices that it uses,
    /// which may be some of a cluster's pools.
    Alike(&'a Strategy, &'a Inputs),
    /// Groups of replicas side by side.
    Groups(&'a Together),
}

/// The result of a search.
pub struct Answer {
    /// The question. On a cluster of several pools it is about those that the best plan uses, in
    /// the order of the pipeline or of the groups.
    pub inputs: Inputs,
    /// The cost model of `inputs`; that of the slowest group where replicas differ.
    pub costs: Arc<CostModel>,
    /// The restrictions on plans that the search obeyed.
    pub constraints: Constraints,
    /// The strategies that were searched; those of the slowest group where replicas differ.
    pub space: SearchSpace,
    /// The best plans, and how many strategies were ruled out by which bound. Where replicas differ, the strategy of the best
    /// plan is that of the first group.
    pub outcome: SearchOutcome,
    /// The strategy in use beside the best plan, if there is one.
    pub compared: Option<Present>,
    /// The ways to use the pools of the cluster that were searched; empty if all of its nodes are alike.
    pub tried: Vec<Tried>,
    /// The pools asked for and their number of GPUs; `None` if all nodes are alike.
    pub pools: Option<(String, u64)>,
    /// The groups of replicas of the best plan, if not all of its replicas are alike.
    pub together: Option<Together>,
}

impl Answer {
    /// The best plan as a plan file.
    ///
    /// # Errors
    /// When the model cannot be sharded as the plan says.
    pub fn plan(&self, best: &Candidate) -> Result<PlanFile, AnswerError> {
        match &self.together {
            Some(together) => together.plan(),
            None => plan::file(&self.inputs, &best.strategy, &best.prediction),
        }
    }
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
        let mut answer = self.best(inputs, costs)?;
        let (costs, outcome) = (&answer.costs, &mut answer.outcome);
        if outcome.top.is_empty() && !outcome.interrupted {
            let (constraints, options) = (self.constraints, &self.options);
            outcome.relax = planner::size::relaxations(costs, constraints, options)?;
            let others = other_runtimes::fitting(&inputs.scenario, constraints, options);
            outcome.relax.extend(others);
        }
        if let Some(now) = self.compared {
            let beside = Beside {
                answer: &answer,
                constraints: self.constraints,
                options: &self.options,
                several: inputs.scenario.cluster.pools.is_some(),
            };
            answer.compared = Some(beside.compare(now)?);
        }
        Ok(answer)
    }

    /// Finds the best plan, without advice where none fits, and without a comparison.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn best(
        &self,
        inputs: &Inputs,
        costs: impl FnOnce() -> Result<Arc<CostModel>, CostError>,
    ) -> Result<Answer, AnswerError> {
        let (best, tried) = self.search_each(inputs)?;
        let answer = match best {
            Some(best) => best,
            None => self.search_one(inputs.clone(), costs()?, self.progress)?,
        };
        let pools = inputs.scenario.cluster.pools.is_some();
        let pools = pools.then(|| (inputs.json.cluster.clone(), inputs.json.gpus));
        Ok(Answer {
            tried,
            pools,
            ..answer
        })
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
            pools: None,
            together: None,
        })
    }

    /// Searches every way to use the pools of a cluster. Returns the answer with the best plan, and
    /// a row for every way that was tried. The answer is `None` if no way has a plan, or if the
    /// cluster has no pools.
    fn search_each(&self, inputs: &Inputs) -> Result<(Option<Answer>, Vec<Tried>), AnswerError> {
        let Some(pools) = &inputs.scenario.cluster.pools else {
            return Ok((None, Vec::new()));
        };
        let arrangements = match self.constraints.allows("groups", 1) {
            true => arrangements::questions(inputs),
            false => Vec::new(),
        };
        let one_after_another = self.one_after_another(arrangements)?;
        let Arranged {
            best,
            tried,
            known,
            interrupted,
        } = one_after_another;
        let mut tried: Vec<Tried> = tried.into_iter().map(|(_, row)| row).collect();
        if interrupted {
            return Ok((best.map(|(_, best)| best), tried));
        }
        let divisions = Divisions {
            inputs,
            pools,
            known: &known,
            constraints: self.constraints,
            options: self.options,
        };
        let weight = |pool: &catalog::Pool| match self.by_cost {
            true => rate(&pool.cluster, pool.gpus),
            false => 1.0,
        };
        let least = best.as_ref().map(|(value, _)| *value);
        let progress = |share: f64| (self.progress)(f64::midpoint(1.0, share));
        let divided = divisions.searched(least, weight, &progress)?;
        tried.extend(divided.tried);
        let interrupted = self.options.stopped();
        let divided = (divided.best)
            .map(|(together, space)| self.divided(together, space, divided.report))
            // The plans shown are the simplest that tie, which may take a little longer than the fastest.
            .filter(|answer| {
                least.is_none_or(|least| self.value(&answer.inputs, &answer.outcome.top[0]) < least)
            });
        let mut best = divided.or(best.map(|(_, best)| best));
        if let Some(best) = &mut best {
            best.outcome.interrupted |= interrupted;
        }
        Ok((best, tried))
    }

    /// The answer in which groups of replicas side by side are the best plan.
    fn divided(&self, together: Together, space: SearchSpace, report: SpaceReport) -> Answer {
        Answer {
            inputs: together.inputs.clone(),
            costs: Arc::clone(&together.slowest().costs),
            constraints: self.constraints.clone(),
            space,
            outcome: SearchOutcome {
                top: vec![together.whole()],
                wishes: Vec::new(),
                space: report,
                relax: Vec::new(),
                interrupted: false,
            },
            compared: None,
            tried: Vec::new(),
            pools: None,
            together: Some(together),
        }
    }

    /// Searches the arrangements of pools through which one pipeline passes, those of fewest pools first. Leaves out those whose bound
    /// shows that they cannot beat the best plan so far.
    fn one_after_another(&self, arrangements: Vec<Inputs>) -> Result<Arranged, AnswerError> {
        let count = 2.0 * arrangements.len().max(1) as f64;
        let mut found = Arranged::default();
        // Plans on few pools are found soon, and often rule out pipelines through many.
        let mut arrangements: Vec<(usize, Inputs)> = arrangements.into_iter().enumerate().collect();
        let pools = |of: &Inputs| {
            of.scenario
                .cluster
                .pools
                .as_ref()
                .map_or(1, |p| p.parts.len())
        };
        arrangements.sort_by_key(|(_, inputs)| pools(inputs));
        for (done, (place, inputs)) in arrangements.into_iter().enumerate() {
            let progress = |share: f64| (self.progress)((done as f64 + share) / count);
            let mut row = Tried::new(&inputs);
            let known: Vec<&CostModel> = found.known.iter().map(AsRef::as_ref).collect();
            let costs = CostModel::sharing(inputs.scenario.clone(), &known).map(Arc::new);
            let answer = costs.map_err(PlannerError::from).and_then(|costs| {
                found.known.push(Arc::clone(&costs));
                match self.may_beat(found.best.as_ref(), &inputs, &costs)? {
                    true => self.search_one(inputs, costs, &progress).map(Some),
                    false => Ok(None),
                }
            });
            match answer {
                Ok(None) => {
                    found.interrupted = self.options.stopped();
                    row.why_none = Some(arrangements::why_none(
                        found.interrupted,
                        Some(self.options.objective),
                    ));
                }
                Err(error @ PlannerError::TooLarge { .. }) => return Err(error.into()),
                Err(error) => row.why_none = Some(error.to_string()),
                Ok(Some(answer)) => {
                    found.interrupted = answer.outcome.interrupted;
                    match answer.outcome.top.first() {
                        None => row.why_none = Some("no plan fits".to_owned()),
                        Some(plan) => {
                            row.step_time_s = Some(plan.prediction.step_time.0);
                            let value = self.value(&answer.inputs, plan);
                            if found.best.as_ref().is_none_or(|(least, _)| value < *least) {
                                found.best = Some((value, answer));
                            }
                        }
                    }
                }
            }
            found.tried.push((place, row));
            if found.interrupted {
                break;
            }
        }
        found.tried.sort_by_key(|(place, _)| *place);
        Ok(found)
    }

    /// Whether an arrangement may have a plan that is better than the best that is known.
    fn may_beat(
        &self,
        best: Option<&(f64, Answer)>,
        inputs: &Inputs,
        costs: &CostModel,
    ) -> Result<bool, PlannerError> {
        let known = best.filter(|_| self.options.objective == Objective::Time);
        let Some((least, _)) = known.filter(|_| !self.options.exhaustive) else {
            return Ok(true);
        };
        let space = SearchSpace::new(costs.scenario(), self.constraints);
        planner::has_within(costs, &space, &self.options, least / self.weight(inputs))
    }

    /// The number by which plans on different pools are compared; smaller is better. It is the step time, the dollars of a
    /// step, or the peak memory as a share of what a device has.
    fn value(&self, inputs: &Inputs, plan: &Candidate) -> f64 {
        let p = &plan.prediction;
        match self.options.objective {
            Objective::Memory => p.peak_memory.as_f64() / p.usable().as_f64(),
            Objective::Time => self.weight(inputs) * p.step_time.0,
        }
    }

    /// Factor on step times before clusters are compared: dollars per hour, or 1 if time counts.
    fn weight(&self, inputs: &Inputs) -> f64 {
        match self.by_cost {
            true => rate(&inputs.scenario.cluster, inputs.json.gpus),
            false => 1.0,
        }
    }
}

/// Compares a strategy in use with the best plan of an answer.
struct Beside<'a> {
    answer: &'a Answer,
    constraints: &'a Constraints,
    options: &'a SearchOptions<'a>,
    /// Whether the cluster that was searched has several pools.
    several: bool,
}

impl Beside<'_> {
    fn compare(&self, now: Now<'_>) -> Result<Present, AnswerError> {
        match now {
            Now::Alike(strategy, on) => self.alike(strategy, on),
            Now::Groups(together) => Ok(self.groups(together)),
        }
    }

    /// Compares equal replicas. A path to the best plan needs the same pools in the same order.
    fn alike(&self, now: &Strategy, on: &Inputs) -> Result<Present, AnswerError> {
        let Answer {
            inputs, together, ..
        } = self.answer;
        let same = together.is_none()
            && inputs.scenario.cluster == on.scenario.cluster
            && inputs.json.gpus == on.json.gpus;
        let costs = match same {
            true => Arc::clone(&self.answer.costs),
            false => {
                let known: [&CostModel; 1] = [&self.answer.costs];
                Arc::new(CostModel::sharing(on.scenario.clone(), &known)?)
            }
        };
        let best = self.answer.outcome.top.first().filter(|_| same);
        let best = best.map(|best| &best.strategy);
        let (constraints, options) = (&self.constraints.of_one_group(), self.options);
        let mut present = planner::present::compare(&costs, constraints, options, now, best)?;
        if self.several {
            let devices = on.scenario.cluster.devices(on.json.gpus);
            self.lies(&mut present, devices, Vec::new(), !same);
        }
        Ok(present)
    }

    /// For groups of replicas, for which no changes of single decisions are listed.
    fn groups(&self, now: &Together) -> Present {
        let known = |together: &Together| -> Vec<(String, Strategy)> {
            (together.parts.iter())
                .map(|part| (part.inputs.cluster_arg.clone(), part.strategy.clone()))
                .collect()
        };
        let best = self.answer.together.as_ref();
        let same = best.is_some_and(|best| known(best) == known(now));
        let mut present = Present {
            fits: self
                .options
                .risk
                .is_none_or(|risk| now.prediction.may_choose(risk)),
            candidate: now.whole(),
            error: now.prediction.ratio_error,
            changes: Vec::new(),
            path: Vec::new(),
            on_pools: None,
        };
        self.lies(&mut present, now.devices(), now.said(), !same);
        present
    }

    /// Adds which devices a strategy in use has and, if the best plan has others, these too.
    fn lies(&self, present: &mut Present, devices: String, groups: Vec<String>, elsewhere: bool) {
        let Answer {
            inputs,
            together,
            outcome,
            ..
        } = self.answer;
        let best_plan = outcome.top.first().filter(|_| elsewhere);
        let elsewhere = best_plan.is_some();
        if let Some(best) = best_plan {
            // Comparing the two has the larger error of both.
            present.error = present.error.max(best.prediction.ratio_error);
        }
        let best = || match together {
            Some(together) => together.devices(),
            None => inputs.scenario.cluster.devices(inputs.json.gpus),
        };
        present.on_pools = Some(OnPools {
            devices,
            groups,
            best_elsewhere: elsewhere.then(best),
        });
    }
}

/// The results for the arrangements of pools through which one pipeline passes.
#[derive(Default)]
struct Arranged {
    /// The best answer, with the value by which it is compared.
    best: Option<(f64, Answer)>,
    /// The result for each arrangement, with its place in their list.
    tried: Vec<(usize, Tried)>,
    /// The cost models of all arrangements that have prices.
    known: Vec<Arc<CostModel>>,
    interrupted: bool,
}

/// Dollars per hour of `gpus` GPUs of a cluster; `gpus` itself if no price is known.
fn rate(cluster: &catalog::Cluster, gpus: u64) -> f64 {
    let dollars = cluster.dollars_per_gpu_hour.as_ref();
    dollars.map_or(1.0, |price| price.value) * gpus as f64
}
