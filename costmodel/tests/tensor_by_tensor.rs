//! An optimizer may update one parameter tensor after another, and clipping may gather one gradient after another. The step then
//! takes longer by the time that the host needs for each of them.

use catalog::{Precision, Seconds, Workload};
use costmodel::{CostModel, Scenario};

/// Number of parameter tensors of Llama 3 8B: seven matrices and two norms in each layer, an embedding, a norm and a head.
const TENSORS: f64 = 32.0 * 9.0 + 3.0;
/// Number of parameters of Llama 3 8B without its embedding and head.
const IN_LAYERS: f64 = 6.98e9;
/// Peak rate of an H100's NVLink in one direction, in bytes per second.
const NVLINK: f64 = 450e9;

/// Seconds of the optimizer step under FSDP2, where the host takes `tensor` seconds to update one tensor and `gradient` seconds to
/// gather one gradient.
fn optimizer(plan: &str, [tensor, gradient]: [f64; 2]) -> f64 {
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
    s.runtime.overheads.optimizer_tensor.value = Seconds(tensor);
    s.runtime.overheads.whole_gradient.value = Seconds(gradient);
    let plan = plans::grammar::parse(plan, &s.model, &s.workload, &s.runtime).expect(plan);
    let costs = CostModel::new(s).expect("priced");
    costs.predict(&plan).expect("priced").breakdown.optimizer_s
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
