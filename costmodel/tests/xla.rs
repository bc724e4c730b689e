//! What XLA makes of a step: gathers of 8-bit weights.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

/// Llama 2 70B over 4,096 tokens on 64 GPUs under MaxText.
fn scenario(cluster: &str, precision: Precision, rewrites: &[Rewrite]) -> Scenario {
    let mut runtime = catalog::load::runtime("maxtext").expect("a preset");
    runtime.rewrites.remove(&Rewrite::GatherNarrowWeights);
    runtime.rewrites.extend(rewrites.iter().copied());
    Scenario {
        model: catalog::load::model("llama2-70b").expect("a preset"),
        cluster: catalog::load::cluster(cluster).expect("a preset"),
        runtime,
        workload: Workload::new(WorkloadSizes {
            gpus: 64,
            seq_len: 4096,
            global_batch: 128,
            precision,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn predicted(scenario: Scenario) -> Prediction {
    let text = "zero=3,mbs=2,recompute=selective_ops";
    let (model, workload) = (&scenario.model, &scenario.workload);
    let strategy = plans::grammar::parse(text, model, workload, &scenario.runtime);
    let strategy = strategy.unwrap_or_else(|e| panic!("{text}: {e}"));
    let costs = CostModel::new(scenario).expect("priced");
    costs.predict(&strategy).expect("predicted")
}

#[test]
fn weights_of_8_bit_products_take_half_the_time_and_memory_of_a_gather() {
    for (precision, narrows) in [(Precision::Fp8, true), (Precision::Bf16, false)] {
        let of = |rewrites: &[Rewrite]| predicted(scenario("dgx-h100", precision, rewrites));
        let [wide, narrow] = [of(&[]), of(&[Rewrite::GatherNarrowWeights])];
        assert_eq!(narrow.step_time < wide.step_time, narrows, "{precision:?}");
        assert_eq!(
            narrow.peak_memory < wide.peak_memory,
            narrows,
            "{precision:?}"
        );
    }
}
