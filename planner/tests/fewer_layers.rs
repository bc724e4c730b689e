//! Plans recompute no more layers, and keep the activations of no more in host memory, than they need to fit.

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, SearchOptions, SearchSpace, search};
use plans::{Decisions, Recompute, Strategy};

fn scenario(model: &str, cluster: &str, runtime: &str, [gpus, seq_len]: [u64; 2]) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster(cluster).expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(WorkloadSizes {
            gpus,
            seq_len,
            global_batch: 256,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.05,
    }
}

/// The strategy with one layer fewer recomputed or in host memory; `None` if that leaves none.
fn with_one_less(d: &Decisions) -> Option<Decisions> {
    let mut d = d.clone();
    let number = match &mut d.recompute {
        Recompute::Layers(number) | Recompute::Falling(number) => number,
        Recompute::None => &mut d.offload_layers,
        _ => return None,
    };
    *number = number.checked_sub(1).filter(|&rest| rest > 0)?;
    Some(d)
}

#[test]
fn with_one_layer_less_plans_do_not_fit_or_are_no_faster() {
    for (model, cluster, runtime, sizes, fix) in [
        (
            "llama3-70b",
            "mi300x",
            "colossalai",
            [32, 4096],
            "recompute=layers|falling",
        ),
        (
            "bloom-176b",
            "dgx-a100",
            "megatron-core",
            [32, 32_768],
            "recompute=layers",
        ),
        (
            "llama3-70b",
            "dgx-h100",
            "megatron-core",
            [32, 8192],
            "recompute=none,pp=1",
        ),
    ] {
        let s = scenario(model, cluster, runtime, sizes);
        let constraints = Constraints::parse(&[fix.to_owned()], &[], &[], &[]).expect(fix);
        let costs = CostModel::new(s.clone()).expect("priced");
        let space = SearchSpace::new(&s, &constraints);
        let options = SearchOptions::default();
        let found = search(&costs, &space, &options, &|_| {}).expect("searched");
        let limit = options.risk.map(|risk| s.limit(risk)).expect("a limit");
        let mut some = 0;
        for plan in &found.top {
            let Some(d) = with_one_less(&plan.strategy) else {
                continue;
            };
            let Ok(less) = Strategy::new(d, &s.model, &s.workload) else {
                continue;
            };
            some += 1;
            let score = costs.score(&less).expect("priced");
            let fits = score.peak_memory <= limit && score.fits_host;
            let faster = score.step_time < plan.prediction.step_time;
            assert!(!(fits && faster), "{less} is faster than {}", plan.strategy);
        }
        assert!(some > 0, "{runtime}: no plan is about some layers");
    }
}
