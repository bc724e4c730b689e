//! Chooses the number of devices: the smallest cluster that fits, and time against cost over sizes.

use catalog::Bytes;
use costmodel::{CostModel, Scenario};
use plans::{Candidate, Recompute};
use rayon::prelude::*;

use crate::PlannerError;
use crate::constraints::Constraints;
use crate::search::{SearchOptions, WAVE, search};
use crate::space::{Family, SearchSpace};

/// The best plan at one number of devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Sized {
    /// Number of devices.
    pub gpus: u64,
    /// The best plan on that many devices; `None` if nothing fits.
    pub best: Option<Candidate>,
}

/// The best plan for each number of devices.
///
/// # Errors
/// When a block cannot be priced.
pub fn sizes(
    scenario: &Scenario,
    constraints: &Constraints,
    counts: &[u64],
) -> Result<Vec<Sized>, PlannerError> {
    let options = SearchOptions {
        top: 1,
        ..SearchOptions::default()
    };
    counts
        .iter()
        .map(|&gpus| {
            let workload = scenario.workload.on(gpus)?;
            let costs = CostModel::new(Scenario {
                workload,
                ..scenario.clone()
            })?;
            let space = SearchSpace::new(costs.scenario(), constraints);
            let outcome = search(&costs, &space, &options, &|_| {})?;
            Ok(Sized {
                gpus,
                best: outcome.top.into_iter().next(),
            })
        })
        .collect()
}

/// Numbers of devices to try: powers of two times a node up to a limit, and smaller numbers below a node.
#[must_use]
pub fn usual_counts(gpus_per_node: u64, most: u64) -> Vec<u64> {
    let below = (0..).map(|i| 1u64 << i).take_while(|&n| n < gpus_per_node);
    let nodes = (0..).map(|i| gpus_per_node << i).take_while(|&n| n <= most);
    below.chain(nodes).filter(|&n| n <= most).collect()
}

/// What to relax if nothing fits: the smallest number of devices that would be enough under the same constraints, the
/// memory needed on the requested number, and the constraint that excludes most.
///
/// # Errors
/// When a block cannot be priced.
pub fn relaxations(
    scenario: &Scenario,
    constraints: &Constraints,
) -> Result<Vec<String>, PlannerError> {
    let mut advice = Vec::new();
    let space = SearchSpace::new(scenario, constraints);
    if space.is_empty() && !constraints.is_empty() {
        let free = SearchSpace::new(scenario, &Constraints::default());
        if !free.is_empty() {
            advice.push("the constraints exclude every strategy; relax one of them".to_owned());
        }
        for (name, without) in single_relaxations(constraints) {
            if !SearchSpace::new(scenario, &without).is_empty() {
                advice.push(format!("without `{name}` there are legal strategies"));
            }
        }
    }
    if space.is_empty() && constraints.is_empty() {
        advice.push(
            "no strategy is legal for these sizes; change the number of GPUs or the global batch"
                .to_owned(),
        );
    }
    if !space.is_empty()
        && let Some(needed) = least_memory(scenario, &space)?
    {
        let device = &scenario.cluster.device;
        advice.push(format!(
            "the lightest strategy needs {needed} of memory per GPU; {} has {}",
            device.name, device.memory.value
        ));
    }
    let node = scenario.cluster.gpus_per_node;
    let most = (scenario.workload.gpus * 64).min(1 << 17).max(node);
    let capacity = CostModel::new(scenario.clone())?.capacity();
    let states = costmodel::states::whole(scenario)?;
    let larger = usual_counts(node, most).into_iter();
    for gpus in larger.filter(|&n| n > scenario.workload.gpus) {
        if states.0 / gpus > capacity.0 {
            continue;
        }
        if let Some(Sized {
            best: Some(best), ..
        }) = sizes(scenario, constraints, &[gpus])?.into_iter().next()
        {
            advice.push(format!(
                "{gpus} GPUs would fit ({})",
                plans::grammar::short(&best.strategy)
            ));
            break;
        }
    }
    Ok(advice)
}

fn single_relaxations(constraints: &Constraints) -> Vec<(String, Constraints)> {
    let mut list = Vec::new();
    for key in constraints.fix.keys() {
        let mut without = constraints.clone();
        without.fix.remove(key);
        list.push((format!("{key}={}", constraints.fix[key].join("|")), without));
    }
    for key in constraints.min.keys() {
        let mut without = constraints.clone();
        without.min.remove(key);
        list.push((format!("min {key}={}", constraints.min[key]), without));
    }
    for key in constraints.max.keys() {
        let mut without = constraints.clone();
        without.max.remove(key);
        list.push((format!("max {key}={}", constraints.max[key]), without));
    }
    list
}

/// The peak memory of the lightest strategy: families are simulated in order of their memory floors, until a floor is
/// above the least peak found.
fn least_memory(scenario: &Scenario, space: &SearchSpace) -> Result<Option<Bytes>, PlannerError> {
    let costs = CostModel::new(scenario.clone())?;
    let lightest = |family: &Family| {
        let full = family.recompute.iter().find(|&&r| r == Recompute::Full);
        let recompute = full.or(family.recompute.last())?;
        family.member(scenario, *recompute)
    };
    let members = space.families.par_iter().filter_map(lightest);
    let mut order = members
        .map(|member| Ok((costs.floors(&member)?.memory, member)))
        .collect::<Result<Vec<_>, PlannerError>>()?;
    order.sort_by_key(|(floor, _)| *floor);
    let mut least: Option<Bytes> = None;
    for wave in order.chunks(WAVE) {
        if least.is_some_and(|least| wave[0].0 >= least) {
            break;
        }
        let peaks = wave.par_iter().map(|(_, member)| costs.score(member));
        let peaks = peaks.map(|score| score.map(|s| s.peak_memory));
        let peaks = peaks.collect::<Result<Vec<_>, _>>()?;
        least = least.into_iter().chain(peaks).min();
    }
    Ok(least)
}
