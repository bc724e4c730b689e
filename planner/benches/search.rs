//! How fast the search is: `cargo bench -p vescale-planner`.
//!
//! `simulate` reports full engine simulations per second on one core over a fixed, unpruned space;
//! `default_search` the wall time of the default search on all cores.

use std::sync::OnceLock;

use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use divan::Bencher;
use divan::counter::ItemsCount;
use planner::{Constraints, SearchOptions, SearchSpace, search};
use plans::Strategy;

fn main() {
    divan::main();
}

fn scenario(model: &str, gpus: u64) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime("megatron-core").expect("preset"),
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

/// Every 64th strategy of the default space of Llama 3 70B on 512 GPUs.
fn sample() -> &'static (CostModel, Vec<Strategy>) {
    static SAMPLE: OnceLock<(CostModel, Vec<Strategy>)> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let s = scenario("llama3-70b", 512);
        let space = SearchSpace::new(&s, &Constraints::default());
        let members: Vec<Strategy> = space
            .families
            .iter()
            .flat_map(|f| f.recompute.iter().filter_map(|&r| f.member(&s, r)))
            .step_by(64)
            .collect();
        (CostModel::new(s).expect("priced"), members)
    })
}

#[divan::bench(sample_count = 10)]
fn simulate(bencher: Bencher<'_, '_>) {
    let (costs, members) = sample();
    bencher
        .counter(ItemsCount::new(members.len()))
        .bench_local(|| {
            for member in members {
                divan::black_box(costs.score(member).expect("priced"));
            }
        });
}

#[divan::bench(sample_count = 3, args = [
    ("llama3-70b", 512),
    ("llama3-70b", 4096),
    ("llama3-70b", 16384),
    ("deepseek-v3", 2048),
    ("llama3.1-405b", 16384),
])]
fn default_search(bencher: Bencher<'_, '_>, (model, gpus): (&str, u64)) {
    bencher.bench_local(|| {
        let s = scenario(model, gpus);
        let costs = CostModel::new(s.clone()).expect("priced");
        let space = SearchSpace::new(&s, &Constraints::default());
        search(&costs, &space, &SearchOptions::default(), &|_| {}).expect("searched")
    });
}
