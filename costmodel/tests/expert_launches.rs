//! What the host launches for layers with experts.

use catalog::{Precision, Seconds, Workload};
use costmodel::{BlockCost, BlockKey, CostModel, Scenario};
use models::BlockClass;
use plans::Recompute;

/// A host that takes a second for every launch, so that times count launches.
const COUNTING: Seconds = Seconds(1.0);

fn scenario(model: &str, runtime: &str, launch: Seconds) -> Scenario {
    let mut scenario = Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: 64,
            seq_len: 4096,
            global_batch: 1024,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    scenario.runtime.overheads.launch.value = launch;
    scenario
}

/// The cost of a layer with experts for one micro-batch.
fn layer(s: &Scenario, text: &str, recompute: Recompute) -> BlockCost {
    let plan = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text);
    let costs = CostModel::new(s.clone()).expect("priced");
    let class = BlockClass::Layer(s.model.layer_class(s.model.layers - 1));
    let key = BlockKey::of(s, &plan, class, recompute);
    costs.block(&key).expect("priced").as_ref().clone()
}

/// Python launches a product of all experts once. C++ launches each expert's part, and data parallelism takes each expert's gradient
/// from Python.
#[test]
fn python_launches_the_products_of_all_experts_at_once() {
    let s = scenario("qwen3-30b-a3b", "megatron-core", COUNTING);
    let [few, many] = [8, 2].map(|ep| {
        let text = format!("dp64 ep{ep} zero1 mbs1 dispatcher=deepep");
        layer(&s, &text, Recompute::None)
    });
    // 16 and 64 experts of two weights each.
    let (experts, weights) = (48.0, 2.0);
    let forward = (many.forward.host - few.forward.host).0;
    let backward = (many.backward.whole.host - few.backward.whole.host).0;
    assert!((0.0..0.01).contains(&forward), "{forward}");
    assert!((backward - experts * weights).abs() < 0.01, "{backward}");
}
