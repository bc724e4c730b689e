//! Data parallelism across pools: groups of replicas with plans of their own, each of which takes a share of the batch.
//!
//! The search covers every way to divide the batch over the groups, with the fastest plan of each
//! group. A step takes as long as the slowest group, plus adding up gradients over groups. Groups
//! agree in what decides results: types of gradients, and whether moments have fewer bits.
//!
//! A group's time for a share is known only after a search; before that, only a lower bound
//! (`rates`). Shares whose slowest group has the least bound are searched first, and none whose
//! bound is above the best found. So the result is the same as from searching every share.
//!
//! Where memory is minimised, a group is judged by the share of memory that is in use on its fullest GPU. Adding up gradients
//! takes no memory. A first search finds the ways to divide the batch whose fullest GPU is the least full. Many plans use no
//! larger share of memory than that; a second search finds the fastest of them.

use std::collections::BTreeMap;

use catalog::{GradientTypes, Link, OptimizerStates, Seconds};
use costmodel::{CostModel, Score};
use plans::prediction::SpaceReport;
use plans::{Candidate, Decisions, Strategy};

use crate::PlannerError;
use crate::choices::{Asked, divisors};
use crate::constraints::Constraints;
use crate::options::{Objective, SearchOptions, bytes_of, share_of};
use crate::rates::Rates;
use crate::search::{first, search};
use crate::shares;
use crate::space::SearchSpace;

/// Largest number of parts into which a batch is divided. Shares of larger batches are multiples of
/// the smallest divisor that keeps to this number.
const MOST_SHARES: u64 = 4096;
/// Largest number of parts where memory is minimised. It is smaller because a plan's memory hardly
/// depends on its share of the batch: bounds rule out few shares, so most are searched.
const MOST_LIGHT_SHARES: u64 = 64;

/// The choices of a strategy that decide results, in which groups of one training agree.
type Results = (Option<GradientTypes>, Option<OptimizerStates>);

/// A cluster that may take a share of a batch.
#[derive(Debug)]
struct Group<'a> {
    /// The cost model of its cluster; the batch of its workload is not read.
    costs: &'a CostModel,
    /// Bounds for every share; `None` before they are needed.
    rates: Option<Rates>,
    found: BTreeMap<(Option<Results>, u64), Known>,
}

/// What is known of a group's best plan for a share.
#[derive(Clone, Debug)]
enum Known {
    /// It takes more than this many seconds, or more than this share of memory; or no plan fits.
    Beyond(f64),
    /// The plan, with the seconds or the share of memory that it takes.
    Plan(f64, Strategy),
}

/// Groups that may train side by side, with all plans searched so far: no share is searched twice.
#[derive(Debug)]
pub struct Groups<'a> {
    constraints: Constraints,
    options: SearchOptions<'a>,
    batch: u64,
    groups: Vec<Group<'a>>,
    report: SpaceReport,
}

/// The best shares of some groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// Seconds of a step.
    pub step_time: f64,
    /// Share of memory that no GPU exceeds, if memory is minimised or limited; else `None`.
    pub fullest: Option<f64>,
    /// Sequences of each group.
    pub shares: Vec<u64>,
    /// The best plan of each group for its share.
    pub strategies: Vec<Strategy>,
}

impl Shared {
    /// The value of the objective: the seconds of a step, or the share of memory.
    #[must_use]
    pub fn minimised(&self) -> f64 {
        self.fullest.unwrap_or(self.step_time)
    }
}

/// Shares of some groups, with what is minimised.
#[derive(Debug)]
struct Solved {
    /// Seconds of a step, or the share of its memory that the fullest GPU takes.
    value: f64,
    shares: Vec<u64>,
    strategies: Vec<Strategy>,
}

/// A group's share of the batch, with its plan.
#[derive(Debug)]
pub struct Share {
    /// The cost model of the group's pools for its share.
    pub costs: CostModel,
    /// The space that the plan was chosen from.
    pub space: SearchSpace,
    /// The plan.
    pub best: Candidate,
}

impl<'a> Groups<'a> {
    /// Makes groups, one on each of `clusters`; nothing is searched yet. `batch` is the number of
    /// sequences that they share. The constraints hold for the plan of each group.
    #[must_use]
    pub fn new(
        clusters: impl IntoIterator<Item = &'a CostModel>,
        batch: u64,
        constraints: &Constraints,
        options: &SearchOptions<'a>,
    ) -> Self {
        let group = |costs: &'a CostModel| Group {
            costs,
            rates: None,
            found: BTreeMap::new(),
        };
        Self {
            constraints: constraints.of_one_group(),
            options: *options,
            batch,
            groups: clusters.into_iter().map(group).collect(),
            report: SpaceReport::default(),
        }
    }

    /// Bounds the times of these groups, if that was not done before.
    fn bound(&mut self, of: &[usize]) -> Result<(), PlannerError> {
        for &at in of {
            let group = &mut self.groups[at];
            if group.rates.is_none() {
                let (costs, options) = (group.costs, &self.options);
                group.rates = Some(match options.exhaustive {
                    true => Rates::default(),
                    false => Rates::new(costs, &self.constraints, options)?,
                });
            }
        }
        Ok(())
    }

    /// How many strategies of all searched shares were simulated or left out, and why.
    #[must_use]
    pub fn report(&self) -> &SpaceReport {
        &self.report
    }

    /// The best shares for the groups with these indices, if the seconds of a step (or the share of
    /// the fullest GPU's memory) are below `within`. The link `between` joins their pools.
    ///
    /// # Errors
    /// When a block cannot be priced.
    pub fn best(
        &mut self,
        of: &[usize],
        between: Option<&Link>,
        within: f64,
    ) -> Result<Option<Shared>, PlannerError> {
        let results = self.results(of);
        match self.options.objective {
            Objective::Time => {
                let exchange = |(gradients, _): &Results| self.exchange(of, *gradients, between);
                let exchanges = results.iter().map(exchange);
                let exchanges: Vec<f64> = exchanges.collect::<Result<_, _>>()?;
                let solved = self.agreed(of, &results, exchanges, within)?;
                Ok(solved.map(|solved| Shared {
                    step_time: solved.value,
                    fullest: self.options.fullest,
                    shares: solved.shares,
                    strategies: solved.strategies,
                }))
            }
            Objective::Memory => {
                let none = vec![0.0; results.len()];
                match self.agreed(of, &results, none, within)? {
                    Some(lightest) => self.fastest(of, between, lightest.value),
                    None => Ok(None),
                }
            }
        }
    }

    /// The fastest shares whose plans use at most the share `fullest` of memory on any GPU.
    fn fastest(
        &mut self,
        of: &[usize],
        between: Option<&Link>,
        fullest: f64,
    ) -> Result<Option<Shared>, PlannerError> {
        let options = self.within_memory(Some(fullest));
        let models = of.iter().map(|&at| self.groups[at].costs);
        let mut groups = Groups::new(models, self.batch, &self.constraints, &options);
        let all: Vec<usize> = (0..of.len()).collect();
        let found = groups.best(&all, between, f64::INFINITY);
        self.add(groups.report());
        found
    }

    /// Options for finding the fastest plans that leave no GPU fuller than `fullest`.
    fn within_memory(&self, fullest: Option<f64>) -> SearchOptions<'a> {
        SearchOptions {
            objective: Objective::Time,
            fullest: fullest.or(self.options.fullest),
            ..self.options
        }
    }

    /// The best shares of groups that all make the same choices, one of `results`. `exchanges` has,
    /// for each of `results`, the seconds to add up gradients.
    fn agreed(
        &mut self,
        of: &[usize],
        results: &[Results],
        exchanges: Vec<f64>,
        within: f64,
    ) -> Result<Option<Solved>, PlannerError> {
        self.bound(of)?;
        let least = exchanges.iter().copied().fold(f64::INFINITY, f64::min);
        // Groups that must agree are no faster than groups that choose freely.
        let Some(free) = self.solved(of, None, least, within)? else {
            return Ok(None);
        };
        let first = results_of(&free.strategies[0]);
        let agree = free.strategies.iter().all(|plan| results_of(plan) == first);
        let known = results.iter().position(|&results| results == first);
        if agree && known.is_some_and(|at| exchanges[at] <= least) {
            return Ok(Some(free));
        }
        let mut best: Option<Solved> = None;
        for (&results, exchange) in results.iter().zip(exchanges) {
            let within = best.as_ref().map_or(within, |best| best.value);
            best = (self.solved(of, Some(results), exchange, within)?).or(best);
        }
        Ok(best)
    }

    /// Every set of result-changing choices that all groups could share.
    fn results(&self, of: &[usize]) -> Vec<Results> {
        let scenario = self.groups[of[0]].costs.scenario();
        let asked = Asked::new(scenario, &self.constraints);
        let states = asked.optimizer_states().into_iter();
        let states = states.map(|of| of.filter(|states| states.changes_results()));
        let mut states: Vec<Option<OptimizerStates>> = states.collect();
        states.dedup();
        let gradients = asked.gradients().into_iter();
        gradients
            .flat_map(|gradients| states.iter().map(move |&states| (gradients, states)))
            .collect()
    }

    /// How many seconds the groups of replicas `of` need to add up their gradients, over the link `between` them if it is given.
    /// `gradients` are the element types of gradients; `None`: those that the runtime uses by itself.
    fn exchange(
        &self,
        of: &[usize],
        gradients: Option<GradientTypes>,
        between: Option<&Link>,
    ) -> Result<f64, PlannerError> {
        let groups: Vec<&CostModel> = of.iter().map(|&at| self.groups[at].costs).collect();
        let scenario = groups[0].scenario();
        let own = scenario.runtime.own_gradients(scenario.workload.precision);
        let reduced = gradients.unwrap_or(own).reduced;
        let time: Seconds = costmodel::exchange(&groups, reduced, between)?;
        Ok(time.0)
    }

    /// Number of sequences that divides every share.
    fn step(&self) -> u64 {
        let options = &self.options;
        let most = match options.objective == Objective::Memory || options.fullest.is_some() {
            true => MOST_LIGHT_SHARES,
            false => MOST_SHARES,
        };
        let few = |&step: &u64| self.batch / step <= most;
        divisors(self.batch).find(few).unwrap_or(self.batch)
    }

    /// The best shares, if their value is below `within`, for groups whose plans all make the
    /// choices `results`; `None`: each group chooses freely.
    fn solved(
        &mut self,
        of: &[usize],
        results: Option<Results>,
        exchange: f64,
        within: f64,
    ) -> Result<Option<Solved>, PlannerError> {
        let step = self.step();
        let total = (self.batch / step) as usize;
        let bound = |group: &Group<'_>| {
            let known = |share: u64| group.value(results, share);
            (0..=total as u64).map(|n| known(n * step)).collect()
        };
        let mut times: Vec<Vec<f64>> = of.iter().map(|&at| bound(&self.groups[at])).collect();
        let mut best: Option<Solved> = None;
        // Only shares whose slowest group takes less than this are worth a search.
        let mut longest = within - exchange;
        while !self.options.stopped() {
            let Some((slowest, numbers)) = shares::least(&times, total, longest) else {
                break;
            };
            if slowest >= longest {
                break;
            }
            let shares: Vec<u64> = numbers.iter().map(|&n| n as u64 * step).collect();
            let unknown = |at: &usize| self.groups[of[*at]].plan(results, shares[*at]).is_none();
            let slower = |&a: &usize, &b: &usize| {
                let [a, b] = [a, b].map(|at| (times[at][numbers[at]], at));
                a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))
            };
            let mut unknown: Vec<usize> = (0..of.len()).filter(unknown).collect();
            unknown.sort_by(|a, b| slower(b, a));
            // Until one division is known, all its groups are searched at once.
            let now = if best.is_some() { 1 } else { of.len() };
            for &next in unknown.iter().take(now) {
                times[next][numbers[next]] =
                    self.search(of[next], results, shares[next], longest)?;
            }
            let taken = (0..of.len()).map(|at| times[at][numbers[at]]);
            let slowest = taken.fold(0.0, f64::max);
            if slowest < longest && unknown.len() <= now {
                let strategies = of.iter().zip(&shares);
                let strategies =
                    strategies.filter_map(|(&at, &n)| self.groups[at].plan(results, n));
                best = Some(Solved {
                    value: slowest + exchange,
                    strategies: strategies.cloned().collect(),
                    shares,
                });
                longest = slowest;
            }
        }
        Ok(best)
    }

    /// Searches a group's best plan for a share, among plans whose value is at most `within`.
    /// Returns that plan's value; if there is none, a lower bound on it.
    fn search(
        &mut self,
        at: usize,
        results: Option<Results>,
        share: u64,
        within: f64,
    ) -> Result<f64, PlannerError> {
        let (costs, space) = self.question(at, results, share)?;
        let memory = costs.capacity();
        let objective = self.options.objective;
        let most = match objective {
            Objective::Time => within,
            Objective::Memory => bytes_of(within, memory).as_f64(),
        };
        let (best, report) = first(&costs, &space, &self.options, most)?;
        self.add(&report);
        let value = |score: &Score| match objective {
            Objective::Time => score.step_time.0,
            Objective::Memory => share_of(score.peak_memory, memory),
        };
        let known = match best {
            Some(best) => Known::Plan(value(&best.score), best.strategy),
            None => Known::Beyond(within),
        };
        let group = &mut self.groups[at];
        group.found.insert((results, share), known);
        Ok(group.value(results, share))
    }

    /// The cost model and the space for a group with this share of the batch.
    fn question(
        &self,
        at: usize,
        results: Option<Results>,
        share: u64,
    ) -> Result<(CostModel, SearchSpace), PlannerError> {
        let whole = self.groups[at].costs;
        let workload = whole.scenario().workload.with_batch(share)?;
        let costs = whole.with_workload(workload)?;
        let constraints = agreeing(&self.constraints, results, costs.scenario());
        let space = SearchSpace::new(costs.scenario(), &constraints);
        Ok((costs, space))
    }

    /// The plans to show of the best shares of groups: in each group the simplest that ties with its fastest.
    ///
    /// # Errors
    /// When a block cannot be priced.
    pub fn plans(&self, of: &[usize], shared: &Shared) -> Result<Vec<Share>, PlannerError> {
        let results = results_of(&shared.strategies[0]);
        let options = SearchOptions {
            top: 1,
            // What was found is searched again even if the search was stopped.
            cancelled: None,
            ..self.within_memory(shared.fullest)
        };
        let mut plans = Vec::with_capacity(of.len());
        for (&at, &share) in of.iter().zip(&shared.shares) {
            let (costs, space) = self.question(at, Some(results), share)?;
            let outcome = search(&costs, &space, &options, &|_| {})?;
            let best = outcome.top.into_iter().next();
            plans.extend(best.map(|best| Share { costs, space, best }));
        }
        Ok(plans)
    }

    fn add(&mut self, report: &SpaceReport) {
        self.report.strategies += report.strategies;
        self.report.simulated += report.simulated;
        self.report.too_large += report.too_large;
        for (own, more) in [
            (&mut self.report.pruned, &report.pruned),
            (&mut self.report.illegal, &report.illegal),
        ] {
            for (reason, count) in more {
                *own.entry(reason.clone()).or_default() += count;
            }
        }
    }
}

impl Group<'_> {
    /// Time (or share of memory) of the best plan for a share, or a lower bound on it.
    fn value(&self, results: Option<Results>, share: u64) -> f64 {
        let rates = self.rates.as_ref();
        let bound = || rates.map_or(0.0, |rates| rates.least(share));
        match self.found.get(&(results, share)) {
            Some(Known::Plan(value, _)) => *value,
            // It takes more than `value`, if only a little.
            Some(Known::Beyond(value)) => value.next_up().max(bound()),
            None if share == 0 => f64::INFINITY,
            None => bound(),
        }
    }

    fn plan(&self, results: Option<Results>, share: u64) -> Option<&Strategy> {
        match self.found.get(&(results, share))? {
            Known::Plan(_, strategy) => Some(strategy),
            Known::Beyond(_) => None,
        }
    }
}

/// Those choices of a strategy that decide results.
fn results_of(d: &Decisions) -> Results {
    let states = d.optimizer_states;
    (
        d.gradients,
        states.filter(|states| states.changes_results()),
    )
}

/// These constraints, and also that strategies have these `results`.
fn agreeing(
    constraints: &Constraints,
    results: Option<Results>,
    scenario: &costmodel::Scenario,
) -> Constraints {
    let mut constraints = constraints.clone();
    let Some((gradients, states)) = results else {
        return constraints;
    };
    let all = Asked::new(scenario, &constraints)
        .optimizer_states()
        .into_iter();
    let precision = scenario.workload.precision;
    let gradients = gradients.unwrap_or(scenario.runtime.own_gradients(precision));
    let alike =
        |other: &Option<OptimizerStates>| other.filter(|other| other.changes_results()) == states;
    let name = |states: Option<OptimizerStates>| {
        states.map_or(OptimizerStates::OWN, OptimizerStates::name)
    };
    let states = all
        .filter(alike)
        .map(|states| name(states).to_owned())
        .collect();
    (constraints.fix).insert("grad_dtype".to_owned(), vec![gradients.name()]);
    constraints.fix.insert("optim_states".to_owned(), states);
    constraints
}
