//! Eager PyTorch works out how the tensors of a tensor-parallel linear layer lie on the ranks whenever the layer runs. If the host
//! takes longer for that than the device for the layer, the step takes the host's time.

use catalog::{Precision, Seconds, Workload};
use costmodel::{CostModel, Scenario};

/// Number of linear layers of Llama 3 8B: seven in each of 32 layers, and the head.
const LINEARS: f64 = 32.0 * 7.0 + 1.0;

/// Seconds of a step in which the host takes `time` for each linear layer in a pass.
fn step(plan: &str, time: f64) -> f64 {
    let mut s = Scenario {
        model: catalog::load::model("llama3-8b").expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime("torchtitan").expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: 8,
            seq_len: 2048,
            global_batch: 8,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    s.runtime.overheads.parallel_linear.value = Seconds(time);
    let plan = plans::grammar::parse(plan, &s.model, &s.workload, &s.runtime).expect(plan);
    let costs = CostModel::new(s).expect("priced");
    costs.predict(&plan).expect("priced").step_time.0
}

#[test]
fn the_host_lays_out_every_linear_layer_in_both_passes() {
    let plan = "tp=8,mbs=8,recompute=none";
    let added = step(plan, 0.2) - step(plan, 0.1);
    let wanted = 2.0 * LINEARS * 0.1;
    assert!((added - wanted).abs() < 0.01 * wanted, "{added} {wanted}");
    // The device takes longer for a layer than a fast host.
    assert_eq!(step(plan, 1e-6), step(plan, 0.0));
}

#[test]
fn whole_linear_layers_need_no_layout() {
    let plan = "dp_shard=8,zero=3,mbs=1";
    assert_eq!(step(plan, 0.1), step(plan, 0.0));
}
