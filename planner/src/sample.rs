//! Samples of a space: strategies spread evenly over its better part, with their time and memory,
//! which plots show in addition to the best plans.

use std::collections::BTreeMap;

use catalog::{Bytes, Seconds};
use costmodel::{CostModel, Lightest, Score};
use plans::{Decisions, Strategy};
use rayon::prelude::*;

use crate::PlannerError;
use crate::executions::{Allows, ExecutionChoice};
use crate::layouts::Layout;
use crate::shapes::Shapes;
use crate::space::{SearchSpace, with_pipeline};

/// Strategies that take more than this share of the memory that may be used are left out.
const LARGEST: f64 = 1.25;

/// Draws about `wanted` strategies, evenly spaced in the order of the space, from layouts whose
/// lower bounds allow it. Returns those that take at most `longest`, and at most a quarter more
/// than the usable memory.
///
/// # Errors
/// When a block cannot be priced.
pub fn sample(
    costs: &CostModel,
    space: &SearchSpace,
    wanted: u64,
    longest: Seconds,
) -> Result<Vec<(Strategy, Score)>, PlannerError> {
    let most = Bytes((costs.capacity().as_f64() * LARGEST) as u64);
    let shapes = Shapes::new(costs, space)?;
    let is_drawn = |layout: &Layout| -> Result<bool, PlannerError> {
        let base = space.decisions(layout);
        let floor = costs.states_floor(&base, &space.lightest(layout, &base))?;
        Ok(floor <= most && shapes.least_time(costs, space, layout)? <= longest)
    };
    let drawn: Vec<bool> = (space.layouts().par_iter())
        .map(is_drawn)
        .collect::<Result<_, _>>()?;
    let members = (0u32..).zip(space.layouts()).zip(drawn);
    let members = members.filter(|(_, is_drawn)| *is_drawn);
    let members = members.map(|((at, layout), _)| (layout, space.members(at)));
    let members: Vec<(&Layout, u64)> = members.collect();
    let all: u64 = members.iter().map(|(_, members)| members).sum();
    let every = spread(all.div_ceil(wanted.max(1)).max(1));
    let spans = members.into_iter().scan(0, |before, (layout, members)| {
        let span = (layout, *before, members);
        *before += members;
        Some(span)
    });
    let spans: Vec<(&Layout, u64, u64)> = spans.collect();
    let found = spans
        .into_par_iter()
        .flat_map_iter(|(layout, before, members)| {
            let first = before.next_multiple_of(every) - before;
            let indices = (first..members).step_by(every as usize);
            let members = Members::new(space, layout);
            indices.filter_map(move |index| {
                let strategy = members.strategy(index);
                scored(costs, strategy, longest, most).transpose()
            })
        });
    found.collect()
}

/// The least number from `every` on that 2, 3 and 5 do not divide. Otherwise all strategies drawn
/// would agree in the choices that change fastest.
fn spread(every: u64) -> u64 {
    let shares = |n: u64| [2, 3, 5].into_iter().any(|of| n.is_multiple_of(of));
    (every..).find(|&n| !shares(n)).unwrap_or(every)
}

/// A strategy with its score, unless it takes more time than `longest` or memory than `most`.
fn scored(
    costs: &CostModel,
    strategy: Strategy,
    longest: Seconds,
    most: Bytes,
) -> Result<Option<(Strategy, Score)>, PlannerError> {
    // States need no prices, and many strategies are too large by these alone.
    let d: &Decisions = &strategy;
    let (on_device, on_host) = match d.offload {
        None => (vec![d.clone()], Vec::new()),
        Some(_) => (Vec::new(), vec![d.clone()]),
    };
    if costs.states_floor(d, &Lightest { on_device, on_host })? > most {
        return Ok(None);
    }
    let score = costs.score_within(&strategy, longest, most)?;
    Ok(score.map(|score| (strategy, score)))
}

/// The strategies of a layout, in the order of [`SearchSpace::strategies`].
struct Members<'a> {
    space: &'a SearchSpace,
    layout: &'a Layout,
    /// The ways to run passes by what a pipeline allows, each with its number of strategies.
    executions: BTreeMap<Allows, Vec<(ExecutionChoice, usize)>>,
}

impl<'a> Members<'a> {
    fn new(space: &'a SearchSpace, layout: &'a Layout) -> Self {
        let mut executions = BTreeMap::new();
        for (pipeline, activations) in space.each_pipeline(layout) {
            let allows = space.allows(layout, pipeline, activations);
            executions.entry(allows).or_insert_with(|| {
                let ways = space.executions(layout, pipeline, activations).into_iter();
                let counted = |way| (way, space.beside(layout, &[way]) as usize);
                ways.map(counted).collect()
            });
        }
        Self {
            space,
            layout,
            executions,
        }
    }

    fn strategy(&self, index: u64) -> Strategy {
        let (space, layout) = (self.space, self.layout);
        let (shardings, orders) = (space.shardings(layout), space.orders(layout));
        let mut index = index as usize;
        let found = space
            .each_pipeline(layout)
            .find_map(|(pipeline, activations)| {
                let allows = space.allows(layout, pipeline, activations);
                self.executions[&allows]
                    .iter()
                    .find_map(|&(execution, beside)| {
                        let found = index < beside;
                        if !found {
                            index -= beside;
                        }
                        found.then_some((pipeline, activations, execution))
                    })
            });
        let (pipeline, activations, execution) =
            found.expect("an index among a layout's strategies");
        let base = space.decisions(layout);
        let d = execution.of(&with_pipeline(&base, pipeline, activations));
        let runtime = space.runtime();
        let ways = shardings.iter();
        let mut ways = ways.filter(|way| execution.leaves(way, runtime));
        let sharding = ways.nth(index / orders.len());
        let sharding = sharding.expect("an index among the ways to shard states");
        space.with_sharding(&d, sharding, orders[index % orders.len()])
    }
}

#[cfg(test)]
mod tests {
    use catalog::{Precision, Workload, WorkloadSizes};
    use costmodel::Scenario;

    use super::*;
    use crate::Constraints;

    #[test]
    fn a_sample_of_all_is_the_space() {
        let scenario = Scenario {
            model: catalog::load::model("gpt2").expect("a preset"),
            cluster: catalog::load::cluster("dgx-a100").expect("a preset"),
            runtime: catalog::load::runtime("megatron-core").expect("a preset"),
            workload: Workload::new(WorkloadSizes {
                gpus: 8,
                seq_len: 1024,
                global_batch: 32,
                precision: Precision::Bf16,
            })
            .expect("a workload"),
            headroom: 0.0,
        };
        let costs = CostModel::new(scenario.clone()).expect("priced");
        let space = SearchSpace::new(&scenario, &Constraints::default());
        let longest = Seconds(f64::INFINITY);
        let whole = sample(&costs, &space, space.len(), longest).expect("simulated");
        let all = || space.layouts().iter().flat_map(|l| space.strategies(l));
        let score = |s: &Strategy| costs.score(s).expect("simulated");
        let small =
            |s: &Strategy| score(s).peak_memory.as_f64() <= costs.capacity().as_f64() * LARGEST;
        let drawn = |of: &[(Strategy, Score)]| -> Vec<Strategy> {
            of.iter().map(|(strategy, _)| strategy.clone()).collect()
        };
        let fitting: Vec<Strategy> = all().filter(small).collect();
        assert_eq!(drawn(&whole), fitting);
        let middle = whole[whole.len() / 2].1.step_time;
        let fast = sample(&costs, &space, space.len(), middle).expect("simulated");
        let is_fast = |s: &Strategy| score(s).step_time <= middle;
        let expected: Vec<Strategy> = fitting.into_iter().filter(is_fast).collect();
        assert_eq!(drawn(&fast), expected);
        let part = sample(&costs, &space, space.len() / 7, longest).expect("simulated");
        assert!(part.len() > whole.len() / 13 && part.len() < whole.len() / 6);
        assert!(part.iter().all(|point| whole.contains(point)));
    }
}
