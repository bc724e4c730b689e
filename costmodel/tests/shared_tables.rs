//! Vocabulary tables that several blocks read are held, sent and summed once.

use catalog::{Model, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

fn predicted(model: &str, plan: &str, change: impl Fn(&mut Scenario)) -> Prediction {
    let mut scenario = Scenario {
        model: catalog::load::model(model).expect("a preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
        runtime: catalog::load::runtime("megatron-core").expect("a preset"),
        workload: Workload::new(WorkloadSizes {
            gpus: 16,
            seq_len: 512,
            global_batch: 32,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    change(&mut scenario);
    let Scenario {
        model,
        workload,
        runtime,
        ..
    } = &scenario;
    let plan = plans::grammar::parse(plan, model, workload, runtime).expect(plan);
    let costs = CostModel::new(scenario).expect("a cost model");
    costs.predict(&plan).expect("a prediction")
}

fn untied(scenario: &mut Scenario) {
    let mut config = (*scenario.model).clone();
    config.tied_embeddings = false;
    scenario.model = Model::new(config, "changed").expect("a model");
}

#[test]
fn a_rank_holds_every_parameter_once() {
    for (name, modules) in [
        ("llama3-8b", 0),
        ("qwen2.5-0.5b", 0),
        ("deepseek-v3", 0),
        ("deepseek-v3", 1),
        ("deepseek-v3", 3),
    ] {
        let with_modules = |scenario: &mut Scenario| {
            let mut config = (*scenario.model).clone();
            config.mtp_layers = modules;
            scenario.model = Model::new(config, "changed").expect("a model");
        };
        let held = predicted(name, "dp16 zero0 mbs1", with_modules).memory_of("parameters");
        let mut config = (*catalog::load::model(name).expect("a preset")).clone();
        config.mtp_layers = modules;
        let all = models::parameters(&config).expect("a model");
        let elements: u64 = all.iter().map(|parameter| parameter.global_elements).sum();
        assert_eq!(held.0, 2 * elements, "{name}, {modules} modules");
    }
}

#[test]
fn the_gradients_of_a_tied_table_are_sent_once() {
    let exposed = |change: fn(&mut Scenario)| {
        let plan = "dp16 zero0 mbs2 overlap=none";
        let of = predicted("qwen2.5-0.5b", plan, |s| {
            change(s);
            s.cluster.scale_out.bandwidth.value.0 /= 100.0;
        });
        of.breakdown.dp_exposed_s
    };
    // 494 million parameters, and 136 million of the table.
    let ratio = exposed(|_| ()) / exposed(untied);
    assert!((ratio - 494.0 / 630.0).abs() < 0.01, "{ratio}");
}

#[test]
fn both_ends_of_a_pipeline_sum_the_gradients_of_a_tied_table() {
    let seconds = |change: fn(&mut Scenario)| {
        let of = predicted("qwen2.5-0.5b", "pp2 dp8 zero0 mbs2", change);
        of.breakdown.dp_exposed_s
    };
    // 136 million gradients of 32 bits cross from node to node at about 47.5 GB/s.
    let more = seconds(|_| ()) - seconds(untied);
    assert!((0.008..0.016).contains(&more), "{more}");
}
