//! How fast the search is: `cargo bench -p vescale-planner`.
//!
//! `simulate` reports simulations of steps per second on one core over a fixed, unpruned space, once of all its pipelines
//! and once of those with 16 stages and 256 micro-batches; `floors` lower bounds per second of the same strategies, and
//! `floors_of_families` those of families of strategies with one layout and pipeline;
//! the others the wall time of searches on all cores. `docs/search.md` has a table of what was measured.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use catalog::{Precision, Workload};
use costmodel::{CostModel, Lightest, Scenario, Shape};
use divan::Bencher;
use divan::counter::ItemsCount;
use planner::{Constraints, SearchOptions, SearchSpace, search};
use plans::{Decisions, Strategy};

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

/// A layout with what it recomputes, and the pipelines of the sample that it has: together with each of these it is a family, whose
/// strategies have one bound in common.
struct Layout {
    decisions: Decisions,
    pipelines: Vec<Arc<Shape>>,
}

/// The families of the sample, by layout.
fn families() -> Vec<Layout> {
    let (costs, members) = any_pipeline();
    let mut layouts: BTreeMap<_, (Decisions, Vec<&Decisions>)> = BTreeMap::new();
    for member in members {
        let d: &Decisions = member;
        let sizes = [d.tp, d.pp, d.cp, d.dp(), d.micro_batch];
        let kinds = (
            d.cp_kind,
            d.sequence_parallel,
            d.recompute.of_first_and_others(),
        );
        let known = layouts.entry((sizes, kinds));
        let (_, pipelines) = known.or_insert_with(|| (d.clone(), Vec::new()));
        let pipeline = |d: &Decisions| (d.schedule, d.vpp, d.stages.clone(), d.recompute);
        if pipelines.iter().all(|known| pipeline(known) != pipeline(d)) {
            pipelines.push(d);
        }
    }
    let shape = |d: &Decisions| costs.shape(d).expect("a schedule");
    let all = layouts.into_values();
    all.map(|(decisions, pipelines)| Layout {
        decisions,
        pipelines: pipelines.into_iter().map(shape).collect(),
    })
    .collect()
}

#[divan::bench(sample_count = 10)]
fn floors_of_families(bencher: Bencher<'_, '_>) {
    let (costs, _) = any_pipeline();
    let layouts = families();
    let count: usize = layouts.iter().map(|layout| layout.pipelines.len()).sum();
    bencher.counter(ItemsCount::new(count)).bench_local(|| {
        for Layout {
            decisions,
            pipelines,
        } in &layouts
        {
            let among = std::slice::from_ref(decisions);
            let lightest = Lightest {
                on_device: among.to_vec(),
                on_host: Vec::new(),
            };
            let orders = [decisions.axis_order];
            let bounds = costs.layout_bounds(among, &lightest, &orders);
            let bounds = bounds.expect("priced");
            for shape in pipelines {
                let limit = Some(costs.capacity());
                divan::black_box(
                    costs
                        .pipeline_floors(&bounds, shape, &[], limit)
                        .expect("priced"),
                );
            }
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

/// A question for which nothing fits, including the advice on what to relax.
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
