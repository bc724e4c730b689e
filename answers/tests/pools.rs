//! Clusters of several pools: one more pool never makes the answer slower, and it is no slower than
//! each pool alone or an even split.

use std::sync::Arc;

use answers::values::Gpus;
use answers::{Answer, Inputs, Question, Search, inputs};
use catalog::{DType, Pools, Precision};
use costmodel::CostModel;
use planner::{Constraints, Objective, SearchOptions};
use plans::Prediction;
use proptest::prelude::*;

/// Nodes that a pool may have, with their GPUs.
const NODES: [(&str, u64); 5] = [
    ("dgx-a100", 8),
    ("dgx2-v100", 16),
    ("dgx-h100", 8),
    ("dgx-h100 at 0.8", 8),
    ("dgx-a100 at 0.6", 8),
];
const BATCH: u64 = 128;

fn question(cluster: &str, gpus: u64, batch: u64) -> Inputs {
    let question = Question {
        model: "llama2-7b".to_owned(),
        config: None,
        cluster: Some(cluster.to_owned()),
        gpus: Gpus::Count(gpus),
        runtime: Some("megatron-core".to_owned()),
        seq: Some(2048),
        global_batch: Some(batch),
        documents: None,
        precision: Precision::Fp16,
        headroom: 0.05,
        adapters: None,
        jitter: None,
    };
    inputs::resolve(&question).expect("a question")
}

/// A space so small that a hundred searches are quick.
fn small() -> Constraints {
    let mut constraints = Constraints::default();
    let fixed = "cp=1,mbs=1,vpp=1,schedule=1f1b,recompute=none|full,zero=1";
    constraints.fix(fixed).expect("constraints");
    constraints
}

fn answer(inputs: &Inputs, tie: Option<f64>) -> Answer {
    let options = SearchOptions {
        top: 1,
        tie,
        ..SearchOptions::default()
    };
    found(inputs, &small(), options)
}

fn found(inputs: &Inputs, constraints: &Constraints, options: SearchOptions<'_>) -> Answer {
    let search = Search {
        constraints,
        options,
        by_cost: false,
        in_use: None,
        compared: None,
        progress: &|_| {},
    };
    let costs = || CostModel::new(inputs.scenario.clone()).map(Arc::new);
    search.find(inputs, costs).expect("searched")
}

/// The step time of the answer; infinite if no plan fits.
fn time(inputs: &Inputs, tie: Option<f64>) -> f64 {
    let found = answer(inputs, tie).outcome.top;
    let best = found.first();
    best.map_or(f64::INFINITY, |best| best.prediction.step_time.0)
}

/// The `--cluster` text of some pools, given as number and kind of nodes, and its number of GPUs.
fn line(pools: &[(u64, usize)], link: &str) -> (String, u64) {
    let part = |&(nodes, kind): &(u64, usize)| format!("{nodes} nodes x {}", NODES[kind].0);
    let parts: Vec<String> = pools.iter().map(part).collect();
    let gpus = pools.iter().map(|&(nodes, kind)| nodes * NODES[kind].1);
    match pools {
        // There is nothing to link.
        [(_, kind)] => (NODES[*kind].0.to_owned(), gpus.sum()),
        _ => (parts.join(" + ") + link, gpus.sum()),
    }
}

/// Step time when every GPU gets equally many sequences and each pool has its own best plan, in
/// seconds; infinite if the batch cannot be divided so.
fn even(pools: &Pools) -> f64 {
    let mut slowest: f64 = 0.0;
    let mut groups = Vec::new();
    for pool in &pools.parts {
        let share = BATCH * pool.gpus / pools.gpus();
        if share * pools.gpus() != BATCH * pool.gpus {
            return f64::INFINITY;
        }
        let inputs = question(&pool.arg, pool.gpus, share);
        slowest = slowest.max(time(&inputs, Some(0.0)));
        groups.push(CostModel::new(inputs.scenario).expect("priced"));
    }
    let groups: Vec<&CostModel> = groups.iter().collect();
    let link = pools.between.as_ref();
    // No gradient type has fewer bytes.
    let exchange = costmodel::exchange(&groups, DType::F16, link).expect("priced");
    slowest + exchange.0
}

fn pools() -> impl Strategy<Value = Vec<(u64, usize)>> {
    prop::collection::vec((1u64..=3, 0..NODES.len()), 2..=3)
}

const LINKS: [&str; 3] = ["", ", 100 Gb/s between", ", 10 Gb/s between, 20 ms away"];

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn one_more_pool_never_slows(pools in pools(), link in prop::sample::select(&LINKS)) {
        let (all, gpus) = line(&pools, link);
        let inputs = question(&all, gpus, BATCH);
        let found = answer(&inputs, Some(0.0));
        let best = found.outcome.top.first();
        let best = best.map_or(f64::INFINITY, |best| best.prediction.step_time.0);
        for left_out in 0..pools.len() {
            let mut fewer = pools.clone();
            fewer.remove(left_out);
            let (fewer, gpus) = line(&fewer, link);
            let without = time(&question(&fewer, gpus, BATCH), Some(0.0));
            prop_assert!(best <= without, "{best} on {all}, {without} on {fewer}");
        }
        let even = even(inputs.scenario.cluster.pools.as_ref().expect("pools"));
        prop_assert!(best <= even * (1.0 + 1e-9), "{best} on {all}, {even} of equal shares");
        // The simplest of the plans that tie may take a little longer.
        let simplest = time(&inputs, None);
        prop_assert!(best <= simplest && simplest <= best * 1.01, "{best}, {simplest} on {all}");
        let Some(together) = &found.together else {
            return Ok(());
        };
        let shares = together.parts.iter();
        let shares = shares.map(|part| part.inputs.scenario.workload.global_batch);
        prop_assert_eq!(shares.sum::<u64>(), BATCH);
        prop_assert!(together.parts.iter().all(|part| part.prediction.fit.fits()));
    }
}

/// Pools that are alike and on one network are predicted as the one pool that they are.
#[test]
fn alike_pools_are_one() {
    for (line, one) in [
        ("16 x dgx-h100 + 16 x dgx-h100", "dgx-h100"),
        (
            "8 x dgx-a100 + 8 x dgx-a100 + 16 x dgx2-v100",
            "16 x dgx-a100 + 16 x dgx2-v100",
        ),
    ] {
        let predicted = |line| {
            let Inputs { scenario, .. } = question(line, 32, BATCH);
            let costs = CostModel::new(scenario).expect("priced");
            let s = costs.scenario();
            let strategy = plans::grammar::parse("tp2 pp2", &s.model, &s.workload, &s.runtime);
            costs.predict(&strategy.expect("legal")).expect("priced")
        };
        assert_eq!(predicted(line), predicted(one), "{line}");
    }
}

/// Two kinds of GPU, two sites, slow nodes: better than each pool alone, and than equal shares.
#[test]
fn mixed_clusters_beat_their_parts_and_equal_shares() {
    for line in [
        "2 nodes x dgx-a100 + 1 node x dgx2-v100",
        "2 nodes x dgx-a100 + 2 nodes x dgx-a100, 400 Gb/s between, 5 ms away",
        "2 nodes x dgx-h100 + 2 nodes x dgx-h100 at 0.7",
    ] {
        let inputs = question(line, 32, BATCH);
        let best = time(&inputs, Some(0.0));
        let pools = inputs.scenario.cluster.pools.as_ref().expect("pools");
        for pool in &pools.parts {
            let alone = time(&question(&pool.arg, pool.gpus, BATCH), Some(0.0));
            assert!(best < alone, "{line}: {best}, {alone} on {}", pool.arg);
        }
        let even = even(pools);
        // Where both are as fast, equal shares are the best.
        let alike = pools.parts[0].cluster == pools.parts[1].cluster;
        assert!(
            best < even || alike && best <= even * (1.0 + 1e-9),
            "{line}: {best}, {even}"
        );
    }
}

/// How full the fullest GPU is.
fn fullness(p: &Prediction) -> f64 {
    p.peak_memory.as_f64() / p.usable().as_f64()
}

/// The lightest plan uses no larger share of memory than any way to use the pools, groups included.
#[test]
fn the_lightest_plan_may_have_groups() {
    let options = SearchOptions {
        objective: Objective::Memory,
        top: 1,
        ..SearchOptions::default()
    };
    let mut divided = 0;
    // Without a pipeline no replica spans pools. A batch of 7 or 11 cannot be divided equally over
    // them.
    for (line, gpus, batch, fixed) in [
        (
            "4 nodes x dgx-h100 + 3 nodes x dgx-a100",
            56,
            7,
            "pp=1,tp=8,cp=1",
        ),
        (
            "4 nodes x dgx-a100 + 3 nodes x dgx-a100, 100 Gb/s between",
            56,
            11,
            "pp=1,tp=8,cp=1",
        ),
        ("1 node x dgx-h100 + 1 node x dgx-a100", 16, BATCH, "cp=1"),
    ] {
        let inputs = question(line, gpus, batch);
        let mut constraints = Constraints::default();
        constraints.fix(fixed).expect("constraints");
        constraints
            .fix("mbs=1,vpp=1,recompute=full,offload=none")
            .expect("constraints");
        let all = found(&inputs, &constraints, options);
        let best = fullness(&all.outcome.top[0].prediction);
        divided += usize::from(all.together.is_some());
        for (groups, side_by_side) in [("groups=1", false), ("groups=2", true)] {
            let mut only = constraints.clone();
            only.fix(groups).expect("a constraint");
            let one_way = found(&inputs, &only, options);
            let Some(plan) = one_way.outcome.top.first() else {
                continue;
            };
            assert!(best <= fullness(&plan.prediction), "{line}: {groups}");
            assert!(plan.prediction.fit.fits());
            assert_eq!(one_way.together.is_some(), side_by_side, "{line}");
            if let Some(together) = one_way.together {
                let parts = together.parts.iter();
                let fullest = parts
                    .map(|part| fullness(&part.prediction))
                    .fold(0.0, f64::max);
                assert_eq!(fullness(&plan.prediction), fullest);
            }
        }
    }
    assert!(divided > 0);
}

/// The plan file of several groups is read back, as a whole and group by group.
#[test]
fn plans_of_groups_are_read_again() {
    let inputs = question("2 nodes x dgx-h100 + 2 nodes x dgx-a100", 32, BATCH);
    let together = answer(&inputs, None).together.expect("groups are the best");
    let file = together.plan().expect("a plan");
    let text = file.to_yaml().expect("written");
    assert_eq!(
        plans::PlanFile::from_yaml(&text, "plan").as_ref(),
        Ok(&file)
    );
    let path = std::path::Path::new("plan.yaml");
    let again = answers::Together::of_plan(&file, path).expect("opened");
    assert_eq!(again.prediction, together.prediction);
    for (number, part) in (1..).zip(&together.parts) {
        let group = file.of_group(number).expect("a group");
        let opened = answers::Opened::of(group, path).expect("opened");
        let alone = opened.costs.predict(&opened.strategy).expect("priced");
        assert_eq!(alone, part.prediction);
    }
    // Groups that do not add up to the whole are refused.
    let mut fewer = file.clone();
    fewer.groups[0].global_batch -= 1;
    let text = fewer.with_id().to_yaml().expect("written");
    let refused = plans::PlanFile::from_yaml(&text, "plan").expect_err("one sequence is missing");
    assert!(
        refused
            .to_string()
            .contains("expected the workload's 32 and 128"),
        "{refused}"
    );
}
