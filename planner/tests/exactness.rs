//! The pruned search equals brute force, whatever the threads.

use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, Objective, SearchOptions, SearchSpace, search};
use plans::SearchOutcome;

fn scenario(model: &str, cluster: &str, gpus: u64, runtime: &str, headroom: f64) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster(cluster).expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len: 2048,
            global_batch: 64,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom,
    }
}

fn run(s: &Scenario, constraints: &Constraints, options: &SearchOptions<'_>) -> SearchOutcome {
    let costs = CostModel::new(s.clone()).expect("priced");
    let space = SearchSpace::new(s, constraints);
    search(&costs, &space, options, &|_| {}).expect("searched")
}

fn names(outcome: &SearchOutcome) -> Vec<(String, f64, u64)> {
    outcome
        .top
        .iter()
        .map(|c| {
            (
                c.strategy.to_string(),
                c.prediction.step_time.0,
                c.prediction.peak_memory.0,
            )
        })
        .collect()
}

/// At least twenty spaces: models dense and with experts, runtimes, sizes, memory, constraints.
fn spaces() -> Vec<(Scenario, Constraints)> {
    let mut spaces = Vec::new();
    let plain = Constraints::default;
    for gpus in [1, 4, 8, 16] {
        spaces.push((
            scenario("gpt2-xl", "dgx-a100", gpus, "megatron-core", 0.1),
            plain(),
        ));
        spaces.push((
            scenario("llama3-8b", "dgx-h100", gpus, "torchtitan", 0.05),
            plain(),
        ));
    }
    for headroom in [0.0, 0.3, 0.6] {
        spaces.push((
            scenario("llama2-13b", "dgx-h100", 16, "megatron-core", headroom),
            plain(),
        ));
        spaces.push((
            scenario("qwen2.5-7b", "aws-p4d", 16, "fsdp2", headroom),
            plain(),
        ));
    }
    for fix in ["tp=2", "pp=2|4", "recompute=full|none", "zero=1,mbs=1"] {
        let mut constraints = plain();
        constraints.fix(fix).expect("well-formed");
        spaces.push((
            scenario("llama3-8b", "dgx-h100", 16, "megatron-core", 0.05),
            constraints,
        ));
    }
    let mut narrow = plain();
    narrow.fix("tp=1|2,pp=1|2,cp=1,mbs=1").expect("well-formed");
    spaces.push((
        scenario("mixtral-8x7b", "dgx-h100", 32, "megatron-core", 0.05),
        narrow.clone(),
    ));
    spaces.push((
        scenario("llama3-8b", "gb200-nvl72", 8, "vescale", 0.05),
        narrow,
    ));
    spaces
}

#[test]
fn pruned_search_equals_brute_force() {
    let spaces = spaces();
    assert!(spaces.len() >= 20);
    for (index, (s, constraints)) in spaces.iter().enumerate() {
        for objective in [Objective::Time, Objective::Memory] {
            let options = SearchOptions {
                objective,
                top: 3,
                ..SearchOptions::default()
            };
            let all = SearchOptions {
                exhaustive: true,
                ..options
            };
            let pruned = run(s, constraints, &options);
            let brute = run(s, constraints, &all);
            assert_eq!(names(&pruned), names(&brute), "space {index} {objective:?}");
            let counted = pruned.space.simulated + pruned.space.pruned.values().sum::<u64>();
            assert_eq!(
                counted, pruned.space.strategies,
                "space {index}: every strategy is accounted for"
            );
        }
    }
}

#[test]
fn threads_do_not_change_the_result() {
    for (s, constraints) in spaces().into_iter().skip(6).take(4) {
        let outcomes: Vec<SearchOutcome> = [1, 2, 8]
            .into_iter()
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .expect("starts");
                pool.install(|| run(&s, &constraints, &SearchOptions::default()))
            })
            .collect();
        assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn less_memory_never_adds_plans() {
    let mut fastest = 0.0f64;
    let mut found = usize::MAX;
    for headroom in [0.0, 0.2, 0.4, 0.6, 0.8, 0.95] {
        let s = scenario("llama3-8b", "dgx-h100", 8, "megatron-core", headroom);
        let options = SearchOptions {
            top: 1000,
            exhaustive: true,
            ..SearchOptions::default()
        };
        let outcome = run(&s, &Constraints::default(), &options);
        assert!(outcome.top.len() <= found);
        found = outcome.top.len();
        if let Some(best) = outcome.top.first() {
            assert!(best.prediction.step_time.0 >= fastest);
            fastest = best.prediction.step_time.0;
        }
    }
}

#[test]
fn constraints_name_the_nearest_dimension() {
    let mut constraints = Constraints::default();
    let error = constraints.fix("tpp=8").expect_err("unknown");
    let said = error.to_string();
    let begins = "constraint `tpp=8`: unknown dimension `tpp`; expected one of tp, ";
    assert!(said.starts_with(begins), "{said}");
    assert!(said.ends_with("; did you mean `tp`?"), "{said}");
    assert!(constraints.fix("tp=0").is_err());
    assert!(constraints.at_most("pp").is_err());
}

#[test]
fn what_does_not_fit_says_what_to_relax() {
    let s = scenario("llama3-70b", "dgx-h100", 8, "megatron-core", 0.05);
    let advice = planner::size::relaxations(&s, &Constraints::default()).expect("priced");
    assert!(
        advice.iter().any(|a| a.contains("GPUs would fit")),
        "{advice:?}"
    );
    assert!(
        advice.iter().any(|a| a.contains("lightest strategy needs")),
        "{advice:?}"
    );
}
