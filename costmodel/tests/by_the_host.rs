//! Work of the host that lengthens a step:
//! - An optimizer may update one parameter tensor after another, and clipping may gather one gradient after another. The step takes
//!   longer by the host's time for each of them.
//! - In eager PyTorch DTensor takes the host some time for every tensor-parallel linear layer. If that is longer than the device
//!   takes for the layer, the step takes the host's time.

use catalog::runtime::Overheads;
use catalog::{Precision, Seconds, Workload};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

/// Number of parameter tensors of Llama 3 8B: seven matrices and two norms in each layer, an embedding, a norm and a head.
const TENSORS: f64 = 32.0 * 9.0 + 3.0;
/// Number of linear layers of Llama 3 8B: seven in each of 32 layers, and the head.
const LINEARS: f64 = 32.0 * 7.0 + 1.0;
/// Number of parameters of Llama 3 8B without its embedding and head.
const IN_LAYERS: f64 = 6.98e9;
/// Peak rate of an H100's NVLink in one direction, in bytes per second.
const NVLINK: f64 = 450e9;

/// The prediction of a plan for Llama 3 8B on eight H100 in torchtitan, after `change` has set times of the host.
fn predict(plan: &str, change: impl Fn(&mut Overheads)) -> Prediction {
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
    change(&mut s.runtime.overheads);
    let plan = plans::grammar::parse(plan, &s.model, &s.workload, &s.runtime).expect(plan);
    let costs = CostModel::new(s).expect("priced");
    costs.predict(&plan).expect("priced")
}

/// Seconds of the optimizer step if the host takes `tensor` seconds to update one tensor and `gradient` seconds to gather one
/// gradient.
fn optimizer(plan: &str, [tensor, gradient]: [f64; 2]) -> f64 {
    let predicted = predict(plan, |overheads| {
        overheads.optimizer_tensor.value = Seconds(tensor);
        overheads.whole_gradient.value = Seconds(gradient);
    });
    predicted.breakdown.optimizer_s
}

/// Seconds of a step if the host takes `time` seconds for each tensor-parallel linear layer in a pass.
fn step(plan: &str, time: f64) -> f64 {
    let predicted = predict(plan, |overheads| {
        overheads.parallel_linear.value = Seconds(time)
    });
    predicted.step_time.0
}

#[test]
fn the_host_takes_its_time_for_every_tensor() {
    for plan in ["dp_shard=8,zero=3,mbs=1", "tp=4,dp_shard=2,zero=3,mbs=1"] {
        let added = optimizer(plan, [1e-3, 0.0]) - optimizer(plan, [0.0, 0.0]);
        assert!((added - TENSORS * 1e-3).abs() < 1e-9, "{plan}: {added}");
    }
}

#[test]
fn clipping_gathers_what_tensor_parallelism_shards() {
    let added = |plan, time| optimizer(plan, [0.0, time]) - optimizer(plan, [0.0, 0.0]);
    assert_eq!(added("dp_shard=8,zero=3,mbs=1", 1e-3), 0.0);
    let sharded = "tp=4,dp_shard=2,zero=3,mbs=1";
    let host = added(sharded, 1e-3);
    assert!((host - TENSORS * 1e-3).abs() < 1e-9, "{host}");
    // A fast host waits for the messages: every rank receives three quarters of the 32-bit gradients.
    let device = added(sharded, 1e-9);
    let received = IN_LAYERS * 4.0 * 0.75 / NVLINK;
    assert!(
        device > received && device < 3.0 * received,
        "{device} {received}"
    );
}

#[test]
fn dtensor_takes_the_host_its_time_for_every_linear_layer_and_pass() {
    let plan = "tp=8,mbs=8,recompute=none";
    let added = step(plan, 0.2) - step(plan, 0.1);
    let wanted = 2.0 * LINEARS * 0.1;
    assert!((added - wanted).abs() < 0.01 * wanted, "{added} {wanted}");
    // The device takes longer for a layer than a fast host.
    assert_eq!(step(plan, 1e-6), step(plan, 0.0));
    let whole = "dp_shard=8,zero=3,mbs=1";
    assert_eq!(step(whole, 0.1), step(whole, 0.0));
}
