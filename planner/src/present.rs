//! Compares the strategy in use with the best plan: what every single change gains, and a short path to the best.

use catalog::Mistake;
use costmodel::{CostModel, Scenario};
use plans::present::{Change, Present, same_results};
use plans::{Candidate, Decisions, Strategy};

use crate::PlannerError;
use crate::constraints::{CHOICES, Constraints, DIMENSIONS, value};
use crate::executions::adapted;
use crate::nearby::{apart, changes, strategies};
use crate::options::SearchOptions;

/// Fixes decisions, by name, to what they are in a strategy, so that a search leaves them as they are.
///
/// # Errors
/// An unknown decision, with the nearest; one that is fixed to something else.
pub fn keep(
    decisions: &[String],
    present: &Strategy,
    constraints: &mut Constraints,
    scenario: &Scenario,
) -> Result<(), PlannerError> {
    let wrong = |mistake: Mistake, key: &str| {
        let mistake = mistake.at(format!("--keep {key}"));
        PlannerError::Constraint(mistake.example("--keep tp,ep"))
    };
    for key in decisions {
        let precision = scenario.workload.precision;
        let Some(now) = value(present, key, &scenario.runtime, precision) else {
            let known = || DIMENSIONS.iter().chain(&CHOICES);
            let names: Vec<&str> = known().copied().collect();
            let unknown = Mistake::new(format!("unknown decision `{key}`"))
                .expected(format!("one of {}", names.join(", ")))
                .nearest(catalog::suggest::nearest(key, names));
            return Err(wrong(unknown, key));
        };
        // `cp_kind` decides nothing at CP 1, nor `prefetch` if no pass gathers parameters.
        let decides = match key.as_str() {
            "cp_kind" => present.cp > 1,
            "prefetch" => present.gathers_in_every_pass(),
            _ => true,
        };
        if !decides {
            continue;
        }
        let fixed = constraints.fix.insert(key.clone(), vec![now.clone()]);
        if let Some(fixed) = fixed.filter(|values| !values.contains(&now)) {
            let fixed = fixed.join("|");
            let both = Mistake::new(format!("`{key}` is {now} now, and --fix asks for {fixed}"));
            return Err(wrong(both.expected("one of the two"), key));
        }
    }
    Ok(())
}

/// Constrains a search to the types of gradients and moments of the strategy in use, because other
/// types would change training results. Constraints of the user on these stay as they are.
pub fn keep_results(present: &Strategy, constraints: &mut Constraints, scenario: &Scenario) {
    let precision = scenario.workload.precision;
    let others = scenario.runtime.other_optimizers(precision).into_iter();
    let all = [None].into_iter().chain(others.map(Some));
    let held = all.map(|optimizer_states| Decisions {
        optimizer_states,
        ..present.decisions().clone()
    });
    let same: Vec<Decisions> = held.filter(|d| same_results(present, d)).collect();
    for key in ["grad_dtype", "optim_states"] {
        let names = same.iter();
        let names = names.filter_map(|d| value(d, key, &scenario.runtime, precision));
        let mut names: Vec<String> = names.collect();
        names.dedup();
        constraints.fix.entry(key.to_owned()).or_insert(names);
    }
}

/// Compares a strategy in use with the best plan found within the same constraints.
///
/// # Errors
/// When a block cannot be priced.
pub fn compare(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
    present: &Strategy,
    best: Option<&Strategy>,
) -> Result<Present, PlannerError> {
    let scenario = costs.scenario();
    let prediction = costs.predict(present)?;
    // The larger error of both is that of comparing them.
    let error = match best {
        Some(best) => costs.predict(best)?.ratio_error.max(prediction.ratio_error),
        None => prediction.ratio_error,
    };
    let near = strategies(scenario, constraints, present);
    Ok(Present {
        // The probability is none where host memory is too small.
        fits: (options.risk).is_none_or(|risk| prediction.may_choose(risk)),
        candidate: Candidate {
            strategy: present.clone(),
            prediction,
            why_not_first: String::new(),
        },
        error,
        changes: changes(costs, options, present, near)?,
        path: match best {
            Some(best) => path(costs, constraints, options, present, best)?,
            None => Vec::new(),
        },
        on_pools: None,
    })
}

/// Successive changes from one strategy to another. Each is the best that gives more decisions
/// their final value; if no single change does, the last step makes all that are left.
fn path(
    costs: &CostModel,
    constraints: &Constraints,
    options: &SearchOptions<'_>,
    from: &Strategy,
    to: &Strategy,
) -> Result<Vec<Change>, PlannerError> {
    let mut steps: Vec<Change> = Vec::new();
    let mut now = from.clone();
    let model = &costs.scenario().model;
    while now.canonical(model) != to.canonical(model) {
        now = with_final_zero(costs.scenario(), now, to);
        let nearer = towards(costs.scenario(), constraints, &now, to);
        let next = changes(costs, options, &now, nearer)?.into_iter().next();
        let next = match next {
            Some(next) => next,
            None => changes(costs, options, &now, vec![("several", to.clone())])?.remove(0),
        };
        now = next.strategy.clone();
        steps.push(next);
    }
    Ok(steps)
}

/// Gives `now` the ZeRO level of `to` if that changes nothing yet, as where there are no ranks to shard states over. Once a later step
/// of the path adds such ranks, they shard states as in `to`. If the level would change something now, `now` stays as it is.
fn with_final_zero(scenario: &Scenario, now: Strategy, to: &Strategy) -> Strategy {
    let model = &scenario.model;
    let as_found = Decisions {
        zero: to.zero,
        ..now.decisions().clone()
    };
    let strategy = Strategy::new(as_found, model, &scenario.workload).ok();
    let same = strategy.filter(|strategy| strategy.canonical(model) == now.canonical(model));
    same.unwrap_or(now)
}

/// Strategies one decision away from `now` that differ from `to` in fewer decisions than `now`.
fn towards(
    scenario: &Scenario,
    constraints: &Constraints,
    now: &Strategy,
    to: &Strategy,
) -> Vec<(&'static str, Strategy)> {
    let unlike = |s: &Strategy| apart(s, to).decisions;
    let mut near = strategies(scenario, constraints, now);
    // A plan found may have numbers of layers that are not among those that a space lists.
    let decision = match to.recompute == now.recompute {
        true => "offload_layers",
        false => "recompute",
    };
    let as_found = Decisions {
        recompute: to.recompute,
        offload_layers: to.offload_layers,
        ..now.decisions().clone()
    };
    if apart(&as_found, now).decisions == 1 && adapted(as_found.clone(), scenario) == as_found {
        let strategy = Strategy::new(as_found, &scenario.model, &scenario.workload);
        let new = |strategy: &Strategy| near.iter().all(|(_, known)| known != strategy);
        let strategy = strategy.ok().filter(new);
        near.extend(strategy.map(|strategy| (decision, strategy)));
    }
    near.retain(|(_, strategy)| unlike(strategy) < unlike(now));
    near
}
