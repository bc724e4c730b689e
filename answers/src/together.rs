//! Groups of replicas side by side on the pools of a cluster, each with a plan and a share of the batch of its own.

use std::path::Path;
use std::sync::Arc;

use catalog::paths::beside;
use catalog::{Bytes, Cluster, Pool, Pools, SpecError};
use costmodel::{CostError, CostModel, Scenario, Side};
use planner::replicas::{Groups, Share};
use planner::{Constraints, Objective, PlannerError, SearchOptions, SearchSpace};
use plans::prediction::SpaceReport;
use plans::{
    Candidate, GroupFile, GroupJson, PlanFile, Prediction, ReplicaGroup, Strategy, grammar,
};
use reports::groups::{Group, sequences};

use crate::arrangements::{Tried, on_pool, why_none};
use crate::error::AnswerError;
use crate::inputs::{Inputs, InputsJson};
use crate::opened::{self, Opened};
use crate::plan;

/// Groups of replicas that train together.
pub struct Together {
    /// The question on all of their pools, group by group.
    pub inputs: Inputs,
    /// The groups; at least two.
    pub parts: Vec<Part>,
    /// Predicted time and memory of all groups together.
    pub prediction: Prediction,
}

/// A group of replicas.
pub struct Part {
    /// The question on its pools with its share of the batch.
    pub inputs: Inputs,
    /// The cost model of that question.
    pub costs: Arc<CostModel>,
    /// The strategy of this group.
    pub strategy: Strategy,
    /// Its predicted time and memory if it trains alone.
    pub prediction: Prediction,
}

impl Together {
    /// Predicts groups that train together.
    ///
    /// # Errors
    /// When gradients cannot be priced.
    pub(crate) fn new(inputs: Inputs, parts: Vec<Part>) -> Result<Self, CostError> {
        let sides: Vec<Side<'_>> = parts.iter().map(Part::side).collect();
        let prediction = costmodel::side_by_side(&inputs.scenario, &sides)?;
        Ok(Self {
            inputs,
            parts,
            prediction,
        })
    }

    /// The groups of a plan file that was read from `path`, predicted anew.
    ///
    /// # Errors
    /// When the file names what is not there, or contradicts itself.
    pub fn of_plan(file: &PlanFile, path: &Path) -> Result<Self, AnswerError> {
        let mut parts = Vec::with_capacity(file.groups.len());
        for number in 1..=file.groups.len() {
            let Some(group) = file.of_group(number) else {
                continue;
            };
            let opened = Opened::of(group, path)?;
            parts.push(Part {
                prediction: opened.costs.predict(&opened.strategy)?,
                strategy: opened.strategy,
                costs: Arc::new(opened.costs),
                inputs: Inputs {
                    scenario: opened.scenario,
                    model_arg: beside(path, &file.model),
                    cluster_arg: beside(path, &opened.file.cluster),
                    json: opened.inputs,
                },
            });
        }
        let wrong = |field: &str, message: String| {
            AnswerError::from(SpecError::field(path.display(), field, message))
        };
        let Some(first) = parts.first() else {
            return Err(wrong("groups", "none; expected at least two".to_owned()));
        };
        let cluster_arg = beside(path, &file.cluster);
        let scenario = Scenario {
            cluster: opened::cluster(path, &file.cluster)?,
            workload: (file.workload.read()).map_err(|why| wrong("workload", why))?,
            ..first.inputs.scenario.clone()
        };
        let inputs = Inputs {
            json: InputsJson::of(&scenario, first.inputs.json.parameters),
            scenario,
            model_arg: first.inputs.model_arg.clone(),
            cluster_arg,
        };
        Ok(Self::new(inputs, parts)?)
    }

    /// The strategy of the first group, with the time and memory of all groups together.
    #[must_use]
    pub fn whole(&self) -> Candidate {
        Candidate::alone(self.parts[0].strategy.clone(), self.prediction.clone())
    }

    /// The groups as JSON.
    #[must_use]
    pub fn json(&self) -> Vec<GroupJson> {
        let runtime = &self.inputs.scenario.runtime;
        let groups = self.parts.iter();
        groups
            .map(|part| GroupJson::new(part.group(), runtime))
            .collect()
    }

    /// The groups as answers show them.
    #[must_use]
    pub fn shown(&self) -> Vec<Group<'_>> {
        self.parts.iter().map(Part::shown).collect()
    }

    /// The devices of all groups, such as `16 × A100 | 32 × V100`.
    #[must_use]
    pub fn devices(&self) -> String {
        let devices: Vec<String> = self
            .shown()
            .into_iter()
            .map(|group| group.devices)
            .collect();
        devices.join(" | ")
    }

    /// Every group in words: its share of the batch, its devices and its strategy.
    #[must_use]
    pub fn said(&self) -> Vec<String> {
        let (shown, runtime) = (self.shown(), &self.inputs.scenario.runtime);
        let all = sequences(&shown);
        let said = |group: &Group<'_>| {
            let strategy = grammar::written(group.strategy, runtime);
            format!("{}; {strategy}", group.said(all))
        };
        shown.iter().map(said).collect()
    }

    /// The plan file.
    ///
    /// # Errors
    /// When the model cannot be sharded as the plan says.
    pub fn plan(&self) -> Result<PlanFile, AnswerError> {
        let first = &self.parts[0];
        let file = plan::file(&self.inputs, &first.strategy, &self.prediction)?;
        let group = |part: &Part| {
            let sharding = plan::sharding(&part.inputs.scenario, &part.strategy)?;
            Ok(GroupFile::of(part.group(), sharding))
        };
        let groups = self.parts.iter().map(group);
        Ok(file.with_groups(groups.collect::<Result<_, AnswerError>>()?))
    }

    /// Memory capacity of a device of the heaviest rank.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        let mut before = 0;
        for part in &self.parts {
            let ranks = part.prediction.memory_by_rank.len();
            let rank = (self.prediction.peak_rank as usize).checked_sub(before);
            if let Some(rank) = rank.filter(|&rank| rank < ranks) {
                return capacity(&part.inputs.scenario.cluster, &part.strategy, rank);
            }
            before += ranks;
        }
        self.inputs.scenario.cluster.device.memory.value
    }

    /// The group whose step takes longest; the first of equals.
    #[must_use]
    pub fn slowest(&self) -> &Part {
        let mut slowest = &self.parts[0];
        for part in &self.parts {
            if part.prediction.step_time > slowest.prediction.step_time {
                slowest = part;
            }
        }
        slowest
    }
}

/// Memory capacity of a device of a pipeline rank.
pub(crate) fn capacity(cluster: &Cluster, strategy: &Strategy, rank: usize) -> Bytes {
    let of_rank = cluster.pools.as_ref().and_then(|pools| {
        let owners = pools.of_pipeline(strategy.pp)?;
        Some(&pools.parts[*owners.get(rank)?].cluster)
    });
    of_rank.unwrap_or(cluster).device.memory.value
}

impl Part {
    fn side(&self) -> Side<'_> {
        Side {
            costs: &self.costs,
            strategy: &self.strategy,
            prediction: &self.prediction,
        }
    }

    fn group(&self) -> ReplicaGroup<'_> {
        ReplicaGroup {
            cluster: &self.inputs.cluster_arg,
            workload: &self.inputs.scenario.workload,
            strategy: &self.strategy,
            prediction: &self.prediction,
        }
    }

    fn shown(&self) -> Group<'_> {
        let scenario = &self.inputs.scenario;
        Group {
            devices: scenario.cluster.devices(scenario.workload.gpus),
            sequences: scenario.workload.global_batch,
            strategy: self.strategy.decisions(),
            gpus_per_node: scenario.cluster.gpus_per_node,
            pools: scenario.cluster.pools.as_deref(),
            prediction: &self.prediction,
        }
    }
}

/// The parameters of a search of groups side by side.
pub(crate) struct Divisions<'a> {
    /// The question on all pools of the cluster.
    pub(crate) inputs: &'a Inputs,
    /// The pools.
    pub(crate) pools: &'a Pools,
    /// Cost models whose block costs can be shared.
    pub(crate) known: &'a [Arc<CostModel>],
    pub(crate) constraints: &'a Constraints,
    pub(crate) options: SearchOptions<'a>,
}

/// The result of a search of groups side by side.
#[derive(Default)]
pub(crate) struct Divided {
    /// The best groups and the search space of their plans; `None` if none are better than the best single pipeline.
    pub(crate) best: Option<(Together, SearchSpace)>,
    /// The ways to divide the pools that were looked at.
    pub(crate) tried: Vec<Tried>,
    /// How many strategies the searches of all groups simulated, and how many they left out for which reason.
    pub(crate) report: SpaceReport,
}

impl Divided {
    /// Keeps the best plan, and shows its time for its division. The plan shown is the simplest
    /// that ties, which may take a little longer than the fastest.
    fn show(&mut self, number: usize, best: Option<(Together, SearchSpace)>) {
        if let Some((together, _)) = &best {
            self.tried[number].step_time_s = Some(together.prediction.step_time.0);
        }
        self.best = best;
    }
}

impl Divisions<'_> {
    /// Searches every way to divide the pools into groups. `weight` turns a step time on some of
    /// the GPUs into what is minimised: dollars per hour, or 1 for the time itself. `least` is the
    /// least value known so far. Where memory is minimised, the value is the share of memory in use
    /// on the fullest GPU.
    pub(crate) fn searched(
        &self,
        least: Option<f64>,
        weight: impl Fn(&Pool) -> f64,
        progress: &dyn Fn(f64),
    ) -> Result<Divided, AnswerError> {
        let mut divisions = self.pools.divisions();
        divisions.retain(|groups| self.constraints.allows("groups", groups.len() as u64));
        let clusters = distinct(&divisions);
        let priced: Vec<_> = clusters.iter().map(|pool| self.costs(pool)).collect();
        let models = priced.iter().filter_map(|costs| costs.as_ref().ok());
        let batch = self.inputs.scenario.workload.global_batch;
        let mut groups = Groups::new(models, batch, self.constraints, &self.options);
        let objective = self.options.objective;
        let mut found = Divided::default();
        let mut best: Option<(f64, usize, Vec<usize>, planner::replicas::Shared)> = None;
        for (number, division) in divisions.iter().enumerate() {
            progress(number as f64 / divisions.len() as f64);
            let whole = self.pools.together(division);
            let mut row = Tried::divided(self.pools.side_by_side(division), whole.gpus);
            let indices = match indices(division, &clusters, &priced) {
                Ok(indices) => indices,
                Err(error) => {
                    row.why_none = Some(error.to_string());
                    found.tried.push(row);
                    continue;
                }
            };
            let weight = weight(&whole);
            let known = best.as_ref().map(|(value, ..)| *value).into_iter();
            let known = known.chain(least).reduce(f64::min);
            // The first division has a group for every pool; its time is shown even if not better.
            let within = match (number, objective) {
                (0, Objective::Time) => f64::INFINITY,
                _ => known.map_or(f64::INFINITY, |value| value / weight),
            };
            match groups.best(&indices, self.pools.between.as_ref(), within)? {
                None => {
                    row.why_none = Some(why_none(self.options.stopped(), known.map(|_| objective)))
                }
                Some(shared) => {
                    row.step_time_s = Some(shared.step_time);
                    let value = shared.minimised() * weight;
                    if known.is_none_or(|known| value < known) {
                        best = Some((value, number, indices, shared));
                    }
                }
            }
            found.tried.push(row);
            if self.options.stopped() {
                break;
            }
        }
        if let Some((_, number, indices, shared)) = best {
            let shares = groups.plans(&indices, &shared)?;
            found.show(number, self.together(&divisions[number], shares)?);
        }
        found.report = groups.report().clone();
        Ok(found)
    }

    fn costs(&self, pool: &Pool) -> Result<CostModel, CostError> {
        let workload = self.inputs.scenario.workload.with_gpus(pool.gpus);
        let workload = workload.unwrap_or_else(|_| self.inputs.scenario.workload.clone());
        let known: Vec<&CostModel> = self.known.iter().map(AsRef::as_ref).collect();
        CostModel::sharing(on_pool(self.inputs, pool, workload).scenario, &known)
    }

    /// The groups of a division with their plans; `None` if a share no longer has a plan.
    fn together(
        &self,
        division: &[Pool],
        shares: Vec<Share>,
    ) -> Result<Option<(Together, SearchSpace)>, AnswerError> {
        if shares.len() < division.len() {
            return Ok(None);
        }
        let whole = self.pools.together(division);
        let gpus = self.inputs.scenario.workload.with_gpus(whole.gpus);
        let workload = gpus.map_err(PlannerError::from)?;
        let mut parts = Vec::with_capacity(shares.len());
        let mut spaces = Vec::with_capacity(shares.len());
        for (pool, share) in division.iter().zip(shares) {
            let workload = share.costs.scenario().workload.clone();
            spaces.push(share.space);
            parts.push(Part {
                inputs: on_pool(self.inputs, pool, workload),
                costs: Arc::new(share.costs),
                strategy: share.best.strategy,
                prediction: share.best.prediction,
            });
        }
        let inputs = on_pool(self.inputs, &whole, workload);
        let together = Together::new(inputs, parts)?;
        let slowest = together.slowest().prediction.step_time;
        let parts = together.parts.iter().zip(spaces);
        let space = parts.filter(|(part, _)| part.prediction.step_time == slowest);
        let space = space.map(|(_, space)| space).next();
        Ok(space.map(|space| (together, space)))
    }
}

/// The clusters of all groups, each once.
fn distinct(divisions: &[Vec<Pool>]) -> Vec<&Pool> {
    let mut clusters: Vec<&Pool> = Vec::new();
    for pool in divisions.iter().flatten() {
        if !clusters.contains(&pool) {
            clusters.push(pool);
        }
    }
    clusters
}

/// For each pool of a division, its index among those of `clusters` that have a cost model.
fn indices<'a>(
    division: &[Pool],
    clusters: &[&Pool],
    priced: &'a [Result<CostModel, CostError>],
) -> Result<Vec<usize>, &'a CostError> {
    let at = |pool: &Pool| clusters.iter().position(|known| *known == pool);
    let place = |at: usize| {
        priced[at].as_ref()?;
        let before = priced[..at].iter().filter(|costs| costs.is_ok());
        Ok(before.count())
    };
    division.iter().filter_map(at).map(place).collect()
}
