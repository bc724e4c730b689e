//! Chooses the number of devices: the smallest cluster that fits, and time against cost over sizes.

use std::collections::BTreeMap;

use catalog::{Bytes, Pools};
use costmodel::{CostModel, Scenario};
use plans::grammar::written;
use plans::{Candidate, Relaxation, SearchOutcome, SpaceReport};

use crate::PlannerError;
use crate::constraints::Constraints;
use crate::options::{RISK_STEP, SearchOptions, limit, risk_to_take};
use crate::search::{least_memory, search};
use crate::space::SearchSpace;

/// Smaller batches that are tried where nothing fits.
const BATCHES_TRIED: u32 = 4;

/// The best plan at one number of devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Sized {
    /// Number of devices.
    pub gpus: u64,
    /// The best plan on that many devices; `None` if there is none.
    pub best: Option<Candidate>,
    /// Why there is no plan, in words.
    pub why_none: Option<String>,
}

/// The best plan on `gpus` devices for the scenario of `costs`, which shares its block costs.
///
/// # Errors
/// When a block cannot be priced.
pub fn sized(
    costs: &CostModel,
    constraints: &Constraints,
    gpus: u64,
    options: &SearchOptions<'_>,
) -> Result<Sized, PlannerError> {
    let workload = costs.scenario().workload.with_gpus(gpus)?;
    let outcome = best_of(&costs.with_workload(workload)?, constraints, options)?;
    let best = outcome.top.into_iter().next();
    Ok(Sized {
        gpus,
        why_none: best.is_none().then(|| why_none(&outcome.space)),
        best,
    })
}

/// The search for the best plan alone.
fn best_of(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<SearchOutcome, PlannerError> {
    let space = SearchSpace::new(costs.scenario(), constraints);
    let options = SearchOptions { top: 1, ..*options };
    search(costs, &space, &options, &|_| {})
}

/// Why a search found no plan, in words: its strategies do not fit, or there are none.
#[must_use]
pub fn why_none(space: &SpaceReport) -> String {
    match space.strategies {
        0 => format!("no strategy is legal{}", by_rule(&space.illegal)),
        _ => "does not fit".to_owned(),
    }
}

/// The rule that leaves out most strategies, after a colon; empty if none was left out.
fn by_rule(illegal: &BTreeMap<String, u64>) -> String {
    let most = illegal.iter().max_by_key(|(_, count)| **count);
    most.map_or_else(String::new, |(rule, _)| format!(": {rule}"))
}

/// Numbers of devices to try: powers of two times a node up to a limit, and smaller numbers below a node.
#[must_use]
pub fn usual_counts(gpus_per_node: u64, most: u64) -> Vec<u64> {
    let below = (0..).map(|i| 1u64 << i).take_while(|&n| n < gpus_per_node);
    let nodes = (0..).map(|i| gpus_per_node << i).take_while(|&n| n <= most);
    below.chain(nodes).filter(|&n| n <= most).collect()
}

/// The numbers of devices to try on several pools, which are taken in order: the usual numbers of
/// the first, then all of it with the usual numbers of whole nodes of the second, and so on.
#[must_use]
pub fn usual_counts_of_pools(pools: &Pools) -> Vec<u64> {
    let mut counts = Vec::new();
    let mut before = 0;
    for pool in &pools.parts {
        let node = pool.cluster.gpus_per_node;
        let own = usual_counts(node, pool.gpus).into_iter();
        let own = own.filter(|&gpus| before == 0 || gpus >= node);
        counts.extend(own.chain([pool.gpus]).map(|gpus| before + gpus));
        before += pool.gpus;
    }
    counts.dedup();
    counts
}

/// What to relax if nothing fits: constraints that exclude every strategy, the memory or the risk
/// needed, a smaller batch, states in host memory, or more devices.
///
/// # Errors
/// When a block cannot be priced.
pub fn relaxations(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<Vec<Relaxation>, PlannerError> {
    let scenario = costs.scenario();
    let mut advice = Vec::new();
    let space = SearchSpace::new(scenario, constraints);
    let rule = by_rule(&space.illegal);
    let mut says = |text: String| advice.push(Relaxation::advice(text));
    if space.is_empty() && constraints.is_empty() {
        says(format!(
            "no strategy is legal for these sizes{rule}; change the number of GPUs or the global batch"
        ));
    } else if space.is_empty() {
        if SearchSpace::has_any(scenario, &Constraints::default()) {
            says(format!(
                "the constraints exclude every strategy{rule}; relax one of them"
            ));
        }
        for (name, without) in single_relaxations(constraints) {
            if SearchSpace::has_any(scenario, &without) {
                says(format!("without `{name}` there are legal strategies"));
            }
        }
    }
    let (lightest, more) = rayon::join(
        || least_memory(costs, constraints, options),
        || with_more_gpus(costs, constraints, options),
    );
    if let Some(needed) = lightest? {
        let device = &scenario.cluster.device;
        let (usable, all) = (scenario.capacity(), device.memory.value);
        let has = match usable < all {
            true => format!("{usable} usable of {all}"),
            false => all.to_string(),
        };
        advice.push(Relaxation::advice(format!(
            "the lightest strategy needs {needed} of memory per GPU; {} has {has}",
            device.name
        )));
        let riskier = |risk| riskier(scenario, needed, risk);
        advice.extend(options.risk.and_then(riskier));
    }
    advice.extend(with_smaller_batch(costs, constraints, options)?);
    advice.extend(offloaded(costs, constraints, options)?);
    advice.extend(more?);
    Ok(advice)
}

/// The smallest usual number of GPUs, up to 64 times those asked for, on which a plan fits.
fn with_more_gpus(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<Option<Relaxation>, PlannerError> {
    let scenario = costs.scenario();
    let node = scenario.cluster.gpus_per_node;
    let most = (scenario.workload.gpus * 64).min(1 << 17).max(node);
    let limit = limit(costs, options);
    let states = costmodel::least_states(scenario)?;
    let larger = usual_counts(node, most).into_iter();
    for gpus in larger.filter(|&n| n > scenario.workload.gpus) {
        if states.0 / gpus > limit.0 {
            continue;
        }
        if let Some(best) = sized(costs, constraints, gpus, options)?.best {
            let strategy = written(&best.strategy, &scenario.runtime);
            return Ok(Some(Relaxation {
                says: format!("{gpus} GPUs would fit ({strategy})"),
                instead: Some(("gpus", gpus.to_string())),
            }));
        }
    }
    Ok(None)
}

/// The largest batch of fewer sequences than asked for, among one sequence for each GPU and halves of that, with which a plan
/// fits. Ranks then accumulate the gradients of few micro-batches or of none.
fn with_smaller_batch(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<Option<Relaxation>, PlannerError> {
    let scenario = costs.scenario();
    let workload = &scenario.workload;
    let gpus = workload.gpus;
    if costmodel::least_states(scenario)?.0 / gpus > limit(costs, options).0 {
        return Ok(None);
    }
    let halves = (0..BATCHES_TRIED).map(|halvings| gpus >> halvings);
    for batch in halves.filter(|&batch| (1..workload.global_batch).contains(&batch)) {
        let smaller = costs.with_workload(workload.with_batch(batch)?)?;
        let found = best_of(&smaller, constraints, options)?;
        if let Some(best) = found.top.first() {
            let strategy = written(&best.strategy, &scenario.runtime);
            return Ok(Some(Relaxation {
                says: format!("a global batch of {batch} would fit ({strategy})"),
                instead: Some(("global-batch", batch.to_string())),
            }));
        }
    }
    Ok(None)
}

/// The best plan if `offload` were not constrained, in words, if that plan offloads states.
fn offloaded(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
) -> Result<Option<Relaxation>, PlannerError> {
    let mut without = constraints.clone();
    let Some(asked) = without.fix.remove("offload") else {
        return Ok(None);
    };
    let found = best_of(costs, &without, options)?;
    let best = found.top.first().map(|best| &best.strategy);
    Ok(best.and_then(|best| {
        let offload = best.offload?.name();
        Some(Relaxation {
            says: format!(
                "without `offload={}` {} would fit",
                asked.join("|"),
                written(best, &costs.scenario().runtime)
            ),
            instead: Some(("fix", format!("offload={offload}"))),
        })
    }))
}

/// The risk that would choose a plan of this peak; `None` if it is less likely to fit than not.
fn riskier(scenario: &Scenario, peak: Bytes, risk: f64) -> Option<Relaxation> {
    let fits = scenario.p_fits(peak);
    let needed = match peak <= scenario.capacity() {
        true => risk_to_take(fits),
        false => risk_to_take(fits).max(plans::EVEN + RISK_STEP),
    };
    (needed > risk && fits >= plans::EVEN).then(|| Relaxation {
        says: format!(
            "it fits with probability {fits:.2}; --risk {needed:.2} would choose such plans"
        ),
        instead: Some(("risk", format!("{needed:.2}"))),
    })
}

/// The constraints without one of them, by its name.
fn single_relaxations(constraints: &Constraints) -> Vec<(String, Constraints)> {
    let without = |(flag, value): (&'static str, String)| {
        let mut without = constraints.clone();
        let key = value.split('=').next().unwrap_or_default();
        let name = match flag {
            "fix" => without.fix.remove(key).map(|_| value.clone()),
            "min" => without.min.remove(key).map(|_| format!("min {value}")),
            _ => without.max.remove(key).map(|_| format!("max {value}")),
        };
        Some((name?, without))
    };
    constraints
        .flags()
        .into_iter()
        .filter_map(without)
        .collect()
}
