//! Numbers that no machine and no model has: a typed error or a prediction of finite numbers, at once and
//! without a panic.

use catalog::{Cluster, DType, Model, Precision, Workload, WorkloadSizes};
use costmodel::{CostError, CostModel, Scenario};
use plans::Prediction;

/// A model of that many parameters, unless that is too many.
fn decoded(kind: &str, fields: &str) -> Option<Model> {
    let json = format!(
        r#"{{"model_type": "{kind}", "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, {fields}}}"#
    );
    catalog::hf::decode(&json, "test", kind).ok()
}

/// A scenario and its plan, where the plan is legal.
fn scenario(
    model: Model,
    cluster: Cluster,
    runtime: &str,
    workload: WorkloadSizes,
    text: &str,
) -> Option<(Scenario, plans::Strategy)> {
    let runtime = catalog::load::runtime(runtime).expect("a preset");
    let workload = Workload::new(workload).expect("a workload");
    let plan = plans::grammar::parse(text, &model, &workload, &runtime).ok()?;
    let scenario = Scenario {
        model,
        cluster,
        runtime,
        workload,
        headroom: 0.0,
    };
    Some((scenario, plan))
}

fn predicted(scenario: Scenario, plan: &plans::Strategy) -> Result<Prediction, CostError> {
    CostModel::new(scenario)?.predict(plan)
}

fn cluster() -> Cluster {
    catalog::load::cluster("dgx-h100").expect("a preset")
}

#[test]
fn unusable_numbers_are_refused() {
    let workload = WorkloadSizes {
        gpus: 16,
        seq_len: 512,
        global_batch: 32,
        precision: Precision::Bf16,
    };
    let model = catalog::load::model("gpt2").expect("a preset");
    type Change = fn(&mut Scenario);
    let changes: [(&str, Change); 9] = [
        ("scale-out latency", |s| {
            s.cluster.scale_out.latency.value.0 = f64::INFINITY
        }),
        ("scale-up bandwidth", |s| {
            s.cluster.scale_up.bandwidth.value.0 = f64::INFINITY
        }),
        ("scale-out bandwidth", |s| {
            s.cluster.scale_out.bandwidth.value.0 = 0.0
        }),
        ("device memory bandwidth", |s| {
            s.cluster.device.memory_bandwidth.value.0 = f64::NAN
        }),
        ("dense peak", |s| {
            s.cluster
                .device
                .peak
                .get_mut(&DType::Bf16)
                .expect("a peak")
                .value
                .0 = -1.0;
        }),
        ("host time per kernel", |s| {
            s.runtime.overheads.launch.value.0 = f64::INFINITY
        }),
        ("slow-down beside collectives", |s| {
            s.runtime.overheads.overlap_slowdown.value = 0.9
        }),
        ("headroom", |s| s.headroom = 1.0),
        ("not finite", |s| {
            s.cluster.scale_out.latency.value.0 = f64::MAX
        }),
    ];
    for (name, change) in changes {
        let parts = scenario(model.clone(), cluster(), "megatron-core", workload, "pp=4");
        let (mut scenario, plan) = parts.expect("legal");
        change(&mut scenario);
        let refused = predicted(scenario, &plan).map(|p| p.step_time);
        let text = refused.expect_err(name).to_string();
        assert!(text.contains(name), "{text}");
    }
}

/// Models far beyond any, that the sizes of a model may still say: a prediction of finite numbers or an
/// error, at once.
#[test]
fn extreme_models_are_predicted_or_refused() {
    let layers = [1, 16, 1000];
    let widths = [(1u64 << 20, 1u64 << 16), (1 << 16, 1), (64, 64)];
    let lengths = [1u64, 1 << 24];
    let mut priced = 0;
    for runtime in ["megatron-core", "fsdp2", "vescale"] {
        for kind in ["llama", "mixtral"] {
            for ((hidden, heads), layers, seq_len) in widths
                .iter()
                .flat_map(|&w| layers.iter().map(move |&l| (w, l)))
                .flat_map(|(w, l)| lengths.iter().map(move |&s| (w, l, s)))
            {
                let built = decoded(
                    kind,
                    &format!(
                        r#""hidden_size": {hidden}, "num_attention_heads": {heads}, "num_key_value_heads": {heads},
                       "intermediate_size": 4096, "num_hidden_layers": {layers}, "vocab_size": 1048576,
                       "num_local_experts": 4096, "num_experts_per_tok": 64"#
                    ),
                );
                let Some(model) = built else { continue };
                let workload = WorkloadSizes {
                    gpus: 8,
                    seq_len,
                    global_batch: 8192,
                    precision: Precision::Bf16,
                };
                for text in ["mbs=1", "mbs=1024", "zero=1,mbs=64,recompute=full"] {
                    let built = scenario(model.clone(), cluster(), runtime, workload, text);
                    let Some((scenario, plan)) = built else {
                        continue;
                    };
                    if let Ok(p) = predicted(scenario, &plan) {
                        let finite = p.step_time.0.is_finite() && p.mfu.is_finite();
                        priced += 1;
                        assert!(
                            finite && p.peak_memory.0 > 0,
                            "{runtime} {kind} {hidden} {text}"
                        );
                    }
                }
            }
        }
    }
    assert!(priced > 50, "only {priced} were priced");
}
