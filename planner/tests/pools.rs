//! Clusters of several pools: the search is exact on them, divides layers by speed, and never loses by one more pool.

use catalog::{Cluster, Pools, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, SearchOptions, SearchSpace};
use plans::{Candidate, Strategy};

fn scenario(cluster: &Cluster, gpus: u64) -> Scenario {
    let sizes = WorkloadSizes {
        gpus,
        seq_len: 2048,
        global_batch: 64,
        precision: Precision::Fp16,
    };
    Scenario {
        model: catalog::load::model("llama2-7b").expect("a preset"),
        cluster: cluster.clone(),
        runtime: catalog::load::runtime("megatron-core").expect("a preset"),
        workload: Workload::new(sizes).expect("a workload"),
        headroom: 0.05,
    }
}

fn best(cluster: &Cluster, gpus: u64, exhaustive: bool) -> Option<Candidate> {
    let costs = CostModel::new(scenario(cluster, gpus)).expect("priced");
    let space = SearchSpace::new(costs.scenario(), &constraints());
    let options = SearchOptions {
        top: 1,
        exhaustive,
        ..SearchOptions::default()
    };
    let outcome = planner::search(&costs, &space, &options, &|_| {}).expect("searched");
    outcome.top.into_iter().next()
}

/// A space that brute force covers in a moment.
fn constraints() -> Constraints {
    let mut constraints = Constraints::default();
    for (key, value) in [
        ("cp", "1"),
        ("mbs", "1"),
        ("recompute", "none"),
        ("recompute", "full"),
    ] {
        let values = constraints.fix.entry(key.to_owned()).or_default();
        values.push(value.to_owned());
    }
    constraints
}

fn pools(line: &str) -> (Cluster, std::sync::Arc<Pools>) {
    let cluster = catalog::load::cluster(line).expect("a cluster");
    let pools = cluster.pools.clone().expect("pools");
    (cluster, pools)
}

const MIXED: [&str; 4] = [
    "16 x dgx-a100 + 16 x dgx2-v100",
    "16 x dgx2-v100 + 8 x dgx-a100",
    "16 x dgx-a100 + 16 x dgx-a100, 10 Gb/s between, 5 ms away",
    "8 x dgx-h100 + 8 x dgx-a100 + 16 x dgx2-v100, 100 Gb/s between",
];

#[test]
fn the_pruned_search_finds_what_brute_force_finds() {
    for line in MIXED {
        let (cluster, pools) = pools(line);
        let [pruned, all] = [false, true].map(|all| best(&cluster, pools.gpus(), all));
        let [pruned, all] = [pruned, all].map(|found| found.expect("a plan fits"));
        assert_eq!(
            (pruned.strategy.to_string(), pruned.prediction.step_time),
            (all.strategy.to_string(), all.prediction.step_time),
            "{line}"
        );
    }
}

/// The best plan on every way to use the pools; the first uses all of them, as they stand.
fn arrangements(pools: &Pools) -> Vec<(String, f64)> {
    let time = |pool: &catalog::Pool| {
        let found = best(&pool.cluster, pool.gpus, false);
        found.map_or(f64::INFINITY, |found| found.prediction.step_time.0)
    };
    let all = pools.arrangements();
    all.iter()
        .map(|pool| (pool.arg.clone(), time(pool)))
        .collect()
}

#[test]
fn one_more_pool_never_slows() {
    for line in MIXED {
        let (_, pools) = pools(line);
        let times = arrangements(&pools);
        let fastest = |arrangements: &[catalog::Pool]| {
            let of = |arg: &String| times.iter().find(|(known, _)| known == arg);
            let found = arrangements.iter().filter_map(|pool| of(&pool.arg));
            found.map(|(_, time)| *time).fold(f64::INFINITY, f64::min)
        };
        let with_all = fastest(&pools.arrangements());
        for left_out in 0..pools.parts.len() {
            let mut fewer = (*pools).clone();
            fewer.parts.remove(left_out);
            assert!(
                with_all <= fastest(&fewer.arrangements()),
                "{line}: {times:?}"
            );
        }
    }
}

#[test]
fn a_plan_for_several_pools_beats_each_of_them_and_an_even_split() {
    for line in [
        "16 x dgx-a100 + 16 x dgx2-v100",
        "16 x dgx-a100 + 16 x dgx-a100, 100 Gb/s between, 5 ms away",
    ] {
        let (cluster, pools) = pools(line);
        let found = best(&cluster, pools.gpus(), false).expect("a plan fits");
        let time = found.prediction.step_time.0;
        for pool in &pools.parts {
            let alone = best(&pool.cluster, pool.gpus, false);
            let alone = alone.map_or(f64::INFINITY, |found| found.prediction.step_time.0);
            assert!(
                time < alone,
                "{line}: {time} with all, {alone} on {}",
                pool.arg
            );
        }
        let costs = CostModel::new(scenario(&cluster, pools.gpus())).expect("priced");
        let even = even(&costs, &found.strategy);
        assert!(time <= even, "{line}: {time}, {even} with equal stages");
    }
}

/// The time of a strategy with equally many layers on every rank.
fn even(costs: &CostModel, strategy: &Strategy) -> f64 {
    let s = costs.scenario();
    let decisions = plans::Decisions {
        stages: plans::StagePartition::even(s.model.layers, strategy.pp),
        ..strategy.decisions().clone()
    };
    let strategy = Strategy::new(decisions, &s.model, &s.workload).expect("legal");
    costs.score(&strategy).expect("scored").step_time.0
}

/// Equal pools on one network are a cluster like any other.
#[test]
fn equal_pools_cost_what_one_cluster_of_them_costs() {
    let (cluster, _) = pools("16 x dgx-a100 + 16 x dgx-a100");
    let plain = catalog::load::cluster("dgx-a100").expect("a preset");
    let [mixed, plain] =
        [&cluster, &plain].map(|cluster| CostModel::new(scenario(cluster, 32)).expect("priced"));
    let space = SearchSpace::new(mixed.scenario(), &Constraints::default());
    let mut compared = 0;
    for layout in space.layouts() {
        for strategy in space.strategies(layout).iter().step_by(97) {
            let both = [&mixed, &plain].map(|costs| {
                let floors = costs.floors(strategy, None, None).expect("bounded");
                (costs.score(strategy).expect("scored"), floors)
            });
            assert_eq!(both[0], both[1], "{strategy}");
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
}
