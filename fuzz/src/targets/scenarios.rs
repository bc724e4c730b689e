//! Random models, clusters, workloads, runtimes and constraints through search, estimate and explain.

use std::sync::OnceLock;
use std::time::Duration;

use costmodel::{CostModel, Scenario};
use planner::{Constraints, SearchOptions, SearchSpace, search};
use plans::SearchOutcome;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::constraints;
use crate::outcome::Outcome;
use crate::promises;
use crate::rng::Rng;
use crate::scene::Scene;
use crate::target::{Depth, Pool, Target};

/// Most strategies of a space that is searched; larger spaces are left to the benches.
const LARGEST_SPACE: u64 = 4000;
/// Alternatives asked for.
const TOP: usize = 4;

/// Pools of one and of two threads.
fn pools() -> Option<&'static [ThreadPool; 2]> {
    static POOLS: OnceLock<Option<[ThreadPool; 2]>> = OnceLock::new();
    let made = || {
        let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build().ok();
        Some([pool(1)?, pool(2)?])
    };
    POOLS.get_or_init(made).as_ref()
}

/// Searches, whose plans are estimated and explained.
pub(super) fn scenarios() -> Target {
    // Two searches, their estimates and explanations.
    Target {
        most_time: Duration::from_secs(15),
        use_every: 1,
        ..Target::of_text("scenarios", seeds, changed, read)
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let scene = Scene::default();
    vec![
        format!("{scene}\n").into_bytes(),
        format!("{scene}\nfix tp=2\nmax pp=2").into_bytes(),
    ]
}

fn changed(_: &Pool, rng: &mut Rng) -> Vec<u8> {
    let scene = Scene::random(rng);
    let lines = if rng.percent(60) {
        constraints::random(rng)
    } else {
        String::new()
    };
    format!("{scene}\n{lines}").into_bytes()
}

fn read(text: &str, _: Depth) -> Outcome {
    let (scene, lines) = Scene::split(text);
    let scenario = match scene.scenario() {
        Ok(scenario) => scenario,
        Err(error) => return Outcome::refused(&error),
    };
    let constraints = match constraints::parse(lines) {
        Ok(constraints) => constraints,
        Err(error) => return Outcome::refused(&error),
    };
    let legal = planner::legal_values::check(&scenario, &[scene.gpus], &constraints);
    match legal {
        Ok(()) => searched(&scenario, &constraints),
        Err(error) => Outcome::refused(&error),
    }
}

fn searched(scenario: &Scenario, constraints: &Constraints) -> Outcome {
    let costs = match CostModel::new(scenario.clone()) {
        Ok(costs) => costs,
        Err(error) => return Outcome::refused(&error),
    };
    let space = SearchSpace::new(scenario, constraints);
    if space.len() > LARGEST_SPACE {
        return Outcome::accepted("too many strategies for a test");
    }
    let options = SearchOptions {
        top: TOP,
        ..SearchOptions::default()
    };
    let Some(pools) = pools() else {
        return Outcome::malformed(&"no threads");
    };
    let run = |costs: &CostModel, pool: &ThreadPool| {
        pool.install(|| search(costs, &space, &options, &|_| {}))
    };
    let one = match run(&costs, &pools[0]) {
        Ok(one) => one,
        Err(error) => return Outcome::refused(&error),
    };
    let mut outcome = Outcome::accepted(features(scenario, &one));
    // With nothing remembered from the first.
    let fresh = CostModel::new(scenario.clone()).map_err(planner::PlannerError::from);
    let two = fresh.and_then(|costs| run(&costs, &pools[1]));
    outcome.expect(two.as_ref() == Ok(&one), || {
        "two threads find something else".to_owned()
    });
    for candidate in &one.top {
        let strategy = &candidate.strategy;
        promises::of_strategy(scenario, strategy, &mut outcome);
        promises::of_prediction(&candidate.prediction, &mut outcome);
        let held = constraints::within(constraints, strategy.decisions());
        outcome.expect(held.is_ok(), || format!("constraint: {held:?}"));
        let allowed = plans::support::allowed_by(
            strategy,
            &scenario.model,
            &scenario.runtime,
            scenario.workload.precision,
        );
        outcome.expect(allowed.is_ok(), || format!("runtime: {allowed:?}"));
        outcome.expect(candidate.prediction.fit.fits(), || {
            "found, and does not fit".to_owned()
        });
    }
    // The first may be slower than the second: it is the simplest plan that ties with the fastest.
    for pair in one.top.get(1..).unwrap_or_default().windows(2) {
        let (first, next) = (pair[0].prediction.step_time, pair[1].prediction.step_time);
        outcome.expect(first.0 <= next.0, || format!("{first:?} before {next:?}"));
    }
    if let Some(best) = one.top.first() {
        explained(scenario, best, &mut outcome);
    }
    outcome
}

/// Estimates and explains the plan that was found.
fn explained(scenario: &Scenario, best: &plans::Candidate, outcome: &mut Outcome) {
    let text = best.strategy.to_string();
    let (model, w, runtime) = (&scenario.model, &scenario.workload, &scenario.runtime);
    let (Ok(strategy), Ok(costs)) = (
        plans::grammar::parse(&text, model, w, runtime),
        CostModel::new(scenario.clone()),
    ) else {
        return outcome.expect(false, || format!("{text} is not read back"));
    };
    match costs.predict(&strategy) {
        Ok(alone) => outcome.expect(alone == best.prediction, || {
            format!(
                "estimated alone: {:?}, found: {:?}",
                alone.step_time, best.prediction.step_time
            )
        }),
        Err(error) => outcome.expect(false, || error.to_string()),
    }
    promises::predicted(scenario, &strategy, outcome);
    if strategy.num_micro_batches * strategy.pp <= 512 {
        match planner::nearby::best_of_each(&costs, &strategy) {
            Ok(neighbours) => {
                for neighbour in neighbours.iter().take(6) {
                    promises::of_strategy(scenario, &neighbour.strategy, outcome);
                    promises::of_prediction(&neighbour.prediction, outcome);
                }
            }
            Err(error) => outcome
                .class
                .push_str(&crate::outcome::kind(&error.to_string())),
        }
    }
}

fn features(scenario: &Scenario, found: &SearchOutcome) -> String {
    let plan = found.top.first().map_or_else(
        || "nothing fits".to_owned(),
        |best| plans::grammar::short(&best.strategy).replace(char::is_numeric, "0"),
    );
    format!(
        "{} {} {plan}",
        scenario.runtime.name,
        scenario.model.moe.is_some()
    )
}
