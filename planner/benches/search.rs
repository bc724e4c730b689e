//! How fast the search is: `cargo bench -p vescale-planner`.
//!
//! `simulate` reports simulations of steps per second on one core over a fixed, unpruned space, once of all its pipelines
//! and once of those with 16 stages and 256 micro-batches; `floors` lower bounds per second of the same strategies;
//! the others the wall time of searches on all cores. `docs/search.md` has a table of what was measured.

use std::sync::OnceLock;

use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use divan::Bencher;
use divan::counter::ItemsCount;
use planner::{Constraints, SearchOptions, SearchSpace, search};
use plans::Strategy;

// The allocator of the binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

fn scenario(model: &str, gpus: u64, runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len: 8192,
            global_batch: gpus.clamp(512, 2048),
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.05,
    }
}

type Sample = (CostModel, Vec<Strategy>);

/// Every `step`th strategy of the space of Llama 3 70B on 512 GPUs, with some decisions fixed.
fn sample(fixed: &[(&str, &str)], step: usize) -> Sample {
    let s = scenario("llama3-70b", 512, "megatron-core");
    let fix = |&(decision, value): &(&str, &str)| (decision.to_owned(), vec![value.to_owned()]);
    let constraints = Constraints {
        fix: fixed.iter().map(fix).collect(),
        ..Constraints::default()
    };
    let space = SearchSpace::new(&s, &constraints);
    let all = space.layouts().iter().flat_map(|l| space.strategies(l));
    let members: Vec<Strategy> = all.step_by(step).collect();
    (CostModel::new(s).expect("priced"), members)
}

/// Strategies of all pipelines.
fn any_pipeline() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| sample(&[], 64))
}

/// Strategies with pipelines of 16 stages and 256 micro-batches.
fn long_pipeline() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    let fixed = [("pp", "16"), ("vpp", "1"), ("dp", "2"), ("mbs", "1")];
    SAMPLE.get_or_init(|| sample(&fixed, 1))
}

#[divan::bench(sample_count = 10, args = ["any pipeline", "16 stages, 256 micro-batches"])]
fn simulate(bencher: Bencher<'_, '_>, of: &str) {
    let (costs, members) = match of {
        "any pipeline" => any_pipeline(),
        _ => long_pipeline(),
    };
    bencher
        .counter(ItemsCount::new(members.len()))
        .bench_local(|| {
            for member in members {
                divan::black_box(costs.score(member).expect("priced"));
            }
        });
}

#[divan::bench(sample_count = 10)]
fn floors(bencher: Bencher<'_, '_>) {
    let (costs, members) = any_pipeline();
    bencher
        .counter(ItemsCount::new(members.len()))
        .bench_local(|| {
            for member in members {
                divan::black_box(costs.floors(member, None, None).expect("priced"));
            }
        });
}

/// The questions whose time is promised: model, devices, runtime.
const QUESTIONS: [(&str, u64, &str); 12] = [
    ("llama3-70b", 512, "megatron-core"),
    ("llama3-70b", 16_384, "megatron-core"),
    ("llama3-70b", 131_072, "megatron-core"),
    ("llama3.1-405b", 16_384, "megatron-core"),
    ("deepseek-v3", 2048, "megatron-core"),
    ("deepseek-v3", 16_384, "megatron-core"),
    ("llama3-70b", 512, "vescale"),
    ("llama3-70b", 16_384, "vescale"),
    ("llama3-70b", 131_072, "vescale"),
    ("llama3.1-405b", 16_384, "vescale"),
    ("deepseek-v3", 2048, "vescale"),
    ("deepseek-v3", 16_384, "vescale"),
];

#[divan::bench(sample_count = 3, args = QUESTIONS)]
fn default_search(bencher: Bencher<'_, '_>, (model, gpus, runtime): (&str, u64, &str)) {
    bencher.bench_local(|| {
        let s = scenario(model, gpus, runtime);
        let costs = CostModel::new(s.clone()).expect("priced");
        let space = SearchSpace::new(&s, &Constraints::default());
        search(&costs, &space, &SearchOptions::default(), &|_| {}).expect("searched")
    });
}

/// A question that nothing answers, with the advice what to relax.
#[divan::bench(sample_count = 3)]
fn nothing_fits(bencher: Bencher<'_, '_>) {
    bencher.bench_local(|| {
        let s = scenario("deepseek-v3", 32, "megatron-core");
        let costs = CostModel::new(s.clone()).expect("priced");
        let constraints = Constraints::default();
        let space = SearchSpace::new(&s, &constraints);
        let options = SearchOptions::default();
        let outcome = search(&costs, &space, &options, &|_| {}).expect("searched");
        assert!(outcome.top.is_empty());
        planner::size::relaxations(&costs, &constraints, &options).expect("priced")
    });
}

/// The best plan for every usual number of devices.
#[divan::bench(sample_count = 3, args = ["llama3-70b", "deepseek-v3"])]
fn sizes(bencher: Bencher<'_, '_>, model: &str) {
    bencher.bench_local(|| {
        let costs = CostModel::new(scenario(model, 2048, "megatron-core")).expect("priced");
        let counts = planner::size::usual_counts(8, 2048).into_iter();
        let constraints = Constraints::default();
        let options = SearchOptions::default();
        let sized = |gpus| planner::size::sized(&costs, &constraints, gpus, &options);
        counts
            .map(sized)
            .collect::<Result<Vec<_>, _>>()
            .expect("priced")
    });
}
