//! What the host launches for layers with experts, and how long the device waits for it.

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

/// Kernels that graphs of layers leave to the host, in forward: of Qwen3 the message to experts, the permutation after it, two products
/// and the activation between them, the message back, the permutation back, and the sum with the residual stream. Python's handling of
/// 16 experts' tensors takes four launches in each product. GPT-OSS adds three operators that clamp, and for its last bias two operators
/// for each of 16 experts and two for all.
#[test]
fn graphs_of_layers_capture_nothing_of_experts() {
    for (model, dispatcher, launches) in [
        ("qwen3-30b-a3b", "hybridep", 8.0 + 8.0),
        ("gpt-oss-120b", "hybridep", 8.0 + 8.0 + 3.0 + 34.0),
        // The permutation is captured; two sorts, four copies of counts and the router's weights are not.
        ("qwen3-30b-a3b", "all_to_all", 7.0 + 8.0 + 2.0 + 4.0 + 1.0),
        ("llama3-8b", "", 0.0),
    ] {
        let s = scenario(model, "megatron-core", COUNTING);
        let text = match dispatcher {
            "" => "dp64 zero1 mbs1".to_owned(),
            name => format!("dp64 ep8 zero1 mbs1 dispatcher={name}"),
        };
        let cost = layer(&s, &text, Recompute::None);
        let left = cost.graphed.forward.0;
        assert!(
            (left - launches).abs() < 0.01,
            "{model} {dispatcher}: {left}"
        );
        assert!(left <= cost.forward.host.0);
        assert!(
            cost.graphed.backward.0 >= left && cost.graphed.backward <= cost.backward.whole.host
        );
    }
}

/// Python launches a product of all experts once, and takes a quarter of a launch for each expert's tensors. C++ launches each expert's
/// part, and data parallelism takes each expert's gradient from Python.
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
    // A product for each weight in forward, two in backward.
    let handled = experts * weights * 0.25;
    assert!((forward - handled).abs() < 0.01, "{forward}");
    assert!(
        (backward - experts * weights - 2.0 * handled).abs() < 0.01,
        "{backward}"
    );
}

/// Ranks tell each other how many rows they send, and the router's weights follow the rows in a message of their own.
#[test]
fn an_all_to_all_comes_with_smaller_messages() {
    for (runtime, zero, forward, backward) in [
        // Counts: seven kernels and four copies. Weights. Two sorts.
        ("megatron-core", "zero1", 7.0 + 4.0 + 1.0 + 2.0, 1.0 + 2.0),
        ("torchtitan", "zero3", 3.0 + 2.0 + 2.0, 2.0),
    ] {
        let s = scenario("qwen3-30b-a3b", runtime, COUNTING);
        let of = |dispatcher: &str| {
            let text = format!("dp64 ep8 {zero} mbs1 dispatcher={dispatcher}");
            layer(&s, &text, Recompute::None)
        };
        let (all, library) = (of("all_to_all"), of("deepep"));
        let beyond = [
            all.forward.host - library.forward.host,
            all.backward.whole.host - library.backward.whole.host,
        ];
        for (beyond, expected) in beyond.into_iter().zip([forward, backward]) {
            assert!((beyond.0 - expected).abs() < 0.01, "{runtime}: {beyond:?}");
        }
    }
}

/// After the host has read how many tokens each expert gets, the device waits until the host is ahead again.
#[test]
fn the_device_waits_once_the_host_has_waited_for_it() {
    let slow = Seconds(100e-6);
    for (runtime, launch, text, waits) in [
        ("megatron-core", slow, "dp64 ep8 zero1 mbs1", true),
        (
            "megatron-core",
            slow,
            "dp64 ep8 zero1 mbs1 dispatcher=deepep",
            true,
        ),
        (
            "megatron-core",
            slow,
            "dp64 ep8 zero1 mbs1 dispatcher=hybridep",
            true,
        ),
        // Sizes of products are read even if no token is sent.
        ("megatron-core", slow, "dp64 zero1 mbs1", true),
        ("torchtitan", slow, "dp64 ep8 zero3 mbs1", true),
        ("torchtitan", slow, "dp64 zero3 mbs1", false),
        ("vescale", slow, "dp64 ep8 mbs1", false),
    ] {
        let s = scenario("qwen3-30b-a3b", runtime, launch);
        let cost = layer(&s, text, Recompute::Full);
        // At least as long as one launch takes, at most as long as all of them.
        let starved = cost.forward.starved;
        assert_eq!(starved.0 > 0.0, waits, "{runtime} {text}: {starved:?}");
        assert!(!waits || (launch..cost.forward.host).contains(&(starved + launch * 0.01)));
        assert_eq!(cost.backward.whole.starved, Seconds(0.0));
        assert_eq!(cost.recompute.starved.0 > 0.0, waits, "{runtime} {text}");
        assert!(cost.graphed.starved_forward <= starved);
        let duration = cost.forward.duration();
        assert_eq!(
            duration,
            cost.forward.host.max(cost.forward.device() + starved)
        );
    }
    // Nothing is read if the experts' kernels run again, but not the exchange before them.
    let s = scenario("qwen3-30b-a3b", "megatron-core", slow);
    let text = "dp64 ep8 zero1 mbs1";
    assert_eq!(layer(&s, text, Recompute::None).recompute.starved.0, 0.0);
}
