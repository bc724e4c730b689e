//! The host time that CUDA graphs save, and the memory that they cost.

use catalog::{CudaGraphs, Precision, Seconds, Workload};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

/// A host that takes this long to issue a kernel is slower than the GPU.
const SLOW_HOST: Seconds = Seconds(100e-6);

fn scenario(model: &str, launch: Option<Seconds>) -> Scenario {
    let mut scenario = Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime("megatron-core").expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: 8,
            seq_len: 4096,
            global_batch: 64,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    if let Some(launch) = launch {
        scenario.runtime.overheads.launch.value = launch;
    }
    scenario
}

fn predicted(scenario: &Scenario, text: &str) -> Prediction {
    let Scenario {
        model,
        workload,
        runtime,
        ..
    } = scenario;
    let plan = plans::grammar::parse(text, model, workload, runtime).expect(text);
    let costs = CostModel::new(scenario.clone()).expect("priced");
    costs.predict(&plan).expect("priced")
}

/// Predictions without graphs, with graphs of layers and with graphs of whole steps.
fn all(scenario: &Scenario, text: &str) -> [Prediction; 3] {
    [CudaGraphs::None, CudaGraphs::Layers, CudaGraphs::Step]
        .map(|graphs| predicted(scenario, &format!("{text},graphs={}", graphs.name())))
}

#[test]
fn a_step_that_waits_for_its_host_is_faster_the_more_is_captured() {
    let [none, layers, step] = all(&scenario("llama3-8b", Some(SLOW_HOST)), "tp=8,zero=1,mbs=1");
    let times = [none.step_time.0, layers.step_time.0, step.step_time.0];
    assert!(times[0] > times[1] && times[1] >= times[2], "{times:?}");
    // What is left is what the GPU takes, on any host.
    let free = predicted(
        &scenario("llama3-8b", Some(Seconds(0.0))),
        "tp=8,zero=1,mbs=1",
    );
    let beyond = step.step_time.0 / free.step_time.0 - 1.0;
    assert!((0.0..0.15).contains(&beyond), "{beyond}");
}

#[test]
fn experts_are_issued_kernel_by_kernel_beside_graphs_of_layers() {
    let gain = |model: &str, text: &str| {
        let s = scenario(model, Some(SLOW_HOST));
        let time = |graphs: &str| {
            predicted(&s, &format!("{text},graphs={graphs}"))
                .step_time
                .0
        };
        time("none") / time("layers")
    };
    let dense = gain("llama3-8b", "tp=8,zero=1,mbs=1");
    let sparse = gain("qwen3-30b-a3b", "tp=1,ep=8,zero=1,mbs=1");
    assert!(1.0 < sparse && sparse < dense, "{sparse} {dense}");
}

#[test]
fn a_step_that_its_gpu_bounds_gains_nothing_and_memory_grows() {
    let [none, layers, step] = all(&scenario("llama3-8b", None), "tp=2,zero=1,mbs=4");
    assert!(none.step_time.0 / step.step_time.0 < 1.01);
    assert!(none.peak_memory < layers.peak_memory && layers.peak_memory < step.peak_memory);
}
