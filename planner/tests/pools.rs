//! Clusters of several pools: the search is exact, divides layers by speed, and never gets slower
//! with one more pool.

use catalog::{Cluster, Pools, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Lightest, Scenario};
use planner::{Constraints, SearchOptions, SearchSpace};
use plans::{Candidate, Decisions, Strategy};

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
    best_of(&costs, &constraints(), exhaustive)
}

fn best_of(costs: &CostModel, constraints: &Constraints, exhaustive: bool) -> Option<Candidate> {
    let space = SearchSpace::new(costs.scenario(), constraints);
    let options = SearchOptions {
        top: 1,
        exhaustive,
        ..SearchOptions::default()
    };
    let outcome = planner::search(costs, &space, &options, &|_| {}).expect("searched");
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
        ("vpp", "1"),
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

/// Clusters with constraints under which a pipeline through the pools has several stages for each rank, around the ranks or in a
/// V, and brute force takes a moment.
const VIRTUAL: [(&str, &str, &str); 5] = [
    (
        "16 x dgx-a100 + 16 x dgx2-v100",
        "megatron-core",
        "pp=2|4,vpp=2|3,recompute=none|full",
    ),
    (
        "8 x dgx-a100 + 16 x dgx2-v100, 100 Gb/s between, 5 ms away",
        "megatron-core",
        "tp=4|8,pp=3|6,vpp=1|2|4,recompute=full|layers:2",
    ),
    (
        "16 x dgx-a100 + 16 x dgx-h100, 10 Gb/s between",
        "megatron-core",
        "tp=8|4|2,pp=4|8,vpp=1|2,recompute=none|full",
    ),
    (
        "8 x dgx-h100 + 8 x dgx-a100 + 16 x dgx2-v100, 50 Gb/s between",
        "megatron-core",
        "tp=8|4,pp=4|8,vpp=1|2|4,recompute=full",
    ),
    (
        "8 x dgx-h100 + 16 x dgx2-v100, 100 Gb/s between",
        "vescale",
        "tp=8|4,pp=3|6,schedule=zb-v|dualpipe-v|interleaved,vpp=2,recompute=none|full",
    ),
];

fn with_virtual_stages((line, runtime, fixed): (&str, &str, &str)) -> (CostModel, Constraints) {
    let (cluster, pools) = pools(line);
    let scenario = scenario(&cluster, pools.gpus());
    let scenario = Scenario {
        runtime: catalog::load::runtime(runtime).expect("a preset"),
        // Interleaved schedules take multiples of the ranks.
        workload: scenario.workload.with_batch(48).expect("a batch"),
        ..scenario
    };
    let mut constraints = Constraints::default();
    constraints.fix(fixed).expect("constraints");
    constraints
        .fix("cp=1,mbs=1,grad_dtype=fp32")
        .expect("constraints");
    let _ = constraints.fix("optim_states=own,offload=none,overlap=grad+param+pp");
    (CostModel::new(scenario).expect("priced"), constraints)
}

#[test]
fn virtual_stages_lie_in_the_pools_of_their_ranks_and_are_searched_exactly() {
    let mut several = 0;
    for question in VIRTUAL {
        let (costs, constraints) = with_virtual_stages(question);
        let [pruned, all] = [false, true].map(|all| best_of(&costs, &constraints, all));
        let [pruned, all] = [pruned, all].map(|found| found.expect(question.0));
        assert_eq!(
            (pruned.strategy.to_string(), pruned.prediction.step_time),
            (all.strategy.to_string(), all.prediction.step_time),
            "{question:?}"
        );
        several += usize::from(all.strategy.vpp > 1);
    }
    assert!(several > 1, "{several}");
}

/// No bound that a search uses is above the simulated value.
#[test]
fn bounds_of_virtual_stages_hold() {
    let mut compared = 0;
    for question in VIRTUAL {
        let (costs, constraints) = with_virtual_stages(question);
        let space = SearchSpace::new(costs.scenario(), &constraints);
        for layout in space.layouts() {
            let base = space.decisions(layout);
            let orders = space.orders(layout);
            for strategy in space.strategies(layout).iter().step_by(5) {
                let score = costs.score(strategy).expect("scored");
                let passes = costs.passes(strategy).expect("simulated");
                let d = Decisions {
                    recompute: strategy.recompute,
                    overlap: strategy.overlap,
                    dispatcher: strategy.dispatcher,
                    graphs: strategy.graphs,
                    ..base.clone()
                };
                let lightest = Lightest {
                    on_device: vec![strategy.decisions().clone()],
                    on_host: Vec::new(),
                };
                let bounds = costs
                    .layout_bounds(&[d], &lightest, orders)
                    .expect("bounded");
                let shape = costs.shape(strategy).expect("a shape");
                let of_pipeline = costs.pipeline_floors(&bounds, &shape, &[], None);
                let all = [
                    costs.floors(strategy, None, None).expect("bounded"),
                    costs.floors(strategy, passes, None).expect("bounded"),
                    of_pipeline.expect("bounded").floors,
                ];
                for floors in all {
                    assert!(
                        floors.time <= score.step_time && floors.memory <= score.peak_memory,
                        "{question:?}: {strategy}: {floors:?}, {score:?}"
                    );
                }
                compared += 1;
            }
        }
    }
    assert!(compared > 500, "{compared}");
}

/// A micro-batch crosses a slow link in every round of the ranks, and back: the more rounds, the longer a step.
#[test]
fn every_round_of_virtual_stages_crosses_the_link() {
    let (cluster, pools) = pools("16 x dgx-a100 + 16 x dgx-a100, 5 Gb/s between, 1 ms away");
    let costs = CostModel::new(scenario(&cluster, pools.gpus())).expect("priced");
    let s = costs.scenario();
    let step = |text: &str| {
        let text = format!("tp8 pp4 dp1 zero0 mbs1 {text}");
        let strategy = plans::grammar::parse(&text, &s.model, &s.workload, &s.runtime);
        let strategy = strategy.expect("a strategy");
        let prediction = costs.predict(&strategy).expect("predicted");
        let score = costs.score(&strategy).expect("scored");
        assert_eq!(prediction.step_time, score.step_time);
        prediction
    };
    // An activation is 2048 x 4096 numbers of two bytes, of which with sequence parallelism each rank has an eighth.
    let once = 2048.0 * 4096.0 * 2.0 / (5.0 * 0.125e9);
    for (text, times) in [
        ("1f1b", 1.0),
        ("vpp2 interleaved", 3.0),
        ("vpp4 interleaved", 7.0),
    ] {
        let found = step(text);
        let on_link = 64.0 * times * once;
        let parts = &found.breakdown;
        assert!(
            found.step_time.0 > on_link,
            "{text}: {:?}, {on_link}",
            found.step_time
        );
        assert!(
            found.step_time.0 < 1.3 * on_link + 2.0,
            "{text}: {:?}, {on_link}",
            found.step_time
        );
        assert!(
            parts.pp_exposed_s + parts.bubble_s > 0.0,
            "{text}: {parts:?}"
        );
    }
}

/// The best plan for every way to use the pools; the first way uses all of them, in their order.
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
