//! Megatron-LM of 2021 and 2022 timed every pass: the host waited for the GPU before and after it. That takes longer only where the
//! host issues layers more slowly than the GPU runs them and long kernels of the head follow.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};

/// Seconds that a step of GPT-2 takes on one A100, with the host's waits and without.
fn steps(plan: &str) -> [f64; 2] {
    [true, false].map(|waits| {
        let mut s = Scenario {
            model: catalog::load::model("gpt2").expect("preset"),
            cluster: catalog::load::cluster("dgx-a100").expect("preset"),
            runtime: catalog::load::runtime("megatron-2022").expect("preset"),
            workload: Workload::new(catalog::WorkloadSizes {
                gpus: 1,
                seq_len: 1024,
                global_batch: 16,
                precision: Precision::Bf16,
            })
            .expect("a workload"),
            headroom: 0.0,
        };
        if !waits {
            assert!(s.runtime.rewrites.remove(&Rewrite::WaitAfterPasses));
        }
        let plan = plans::grammar::parse(plan, &s.model, &s.workload, &s.runtime).expect(plan);
        let costs = CostModel::new(s).expect("priced");
        costs.predict(&plan).expect("priced").step_time.0
    })
}

#[test]
fn waits_show_where_the_host_is_slower_than_layers_but_not_than_the_head() {
    let [waits, runs_ahead] = steps("mbs4");
    assert!(waits > 1.01 * runs_ahead, "{waits} {runs_ahead}");
    // The GPU is slower throughout: what is left is the first kernels of each pass, before which it has nothing to do.
    let [waits, runs_ahead] = steps("mbs16");
    assert!(
        (1.0..1.01).contains(&(waits / runs_ahead)),
        "{waits} {runs_ahead}"
    );
}
