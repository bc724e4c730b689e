//! Scenarios that no embedded run covers: other models, devices and systems. Nothing here knows a
//! measured time; what must hold is physics and what such systems are known to reach.

use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use plans::{Fit, Prediction, Strategy as Plan};
use proptest::prelude::*;

/// A scenario in words.
#[derive(Clone, Copy, Debug)]
struct Case {
    model: &'static str,
    cluster: &'static str,
    runtime: &'static str,
    precision: Precision,
    gpus: u64,
    seq_len: u64,
    batch: u64,
    strategy: &'static str,
}

fn predict(case: Case) -> Prediction {
    let scenario = Scenario {
        model: catalog::load::model(case.model).expect("preset"),
        cluster: catalog::load::cluster(case.cluster).expect("preset"),
        runtime: catalog::load::runtime(case.runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: case.gpus,
            seq_len: case.seq_len,
            global_batch: case.batch,
            precision: case.precision,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    let plan: Plan = plans::grammar::parse(
        case.strategy,
        &scenario.model,
        &scenario.workload,
        &scenario.runtime,
    )
    .expect(case.strategy);
    CostModel::new(scenario)
        .expect("priced")
        .predict(&plan)
        .expect("priced")
}

#[rustfmt::skip]
const CASES: [(Case, f64, f64); 16] = {
    use Precision::{Bf16, Fp16, Fp8};
    const fn case(
        model: &'static str,
        cluster: &'static str,
        runtime: &'static str,
        precision: Precision,
        [gpus, seq_len, batch]: [u64; 3],
        strategy: &'static str,
    ) -> Case {
        Case { model, cluster, runtime, precision, gpus, seq_len, batch, strategy }
    }
    // Dense models without model parallelism on NVLink nodes: 35-60% of the peak, less a third of it
    // where everything is recomputed.
    [
        (case("llama2-7b", "dgx-a100", "deepspeed", Bf16, [8, 4096, 64], "dp_shard=8,zero=3,mbs=2,recompute=full"), 0.33, 0.55),
        (case("llama2-7b", "dgx-a100", "deepspeed", Bf16, [64, 4096, 256], "dp_shard=64,zero=3,mbs=1,recompute=full"), 0.30, 0.55),
        (case("tinyllama-1.1b", "dgx-a100-40gb", "fsdp1", Bf16, [16, 2048, 512], "dp_shard=16,zero=3,mbs=8"), 0.35, 0.60),
        (case("gpt2-xl", "dgx2-v100", "deepspeed", Fp16, [16, 1024, 256], "dp_shard=16,zero=2,mbs=4"), 0.25, 0.60),
        (case("llama3-8b", "dgx-b200", "nemo", Bf16, [8, 8192, 128], "dp_shard=8,zero=1,mbs=2"), 0.40, 0.60),
        // In 8 bits against a peak twice as high.
        (case("llama3-8b", "dgx-b200", "nemo", Fp8, [8, 8192, 128], "dp_shard=8,zero=1,mbs=2"), 0.27, 0.45),
        // 4D parallelism of dense models: 40-55% on Hopper and Blackwell.
        (case("llama3-70b", "dgx-h200", "megatron-core", Bf16, [64, 8192, 128], "tp=4,pp=4,vpp=5,dp_shard=4,zero=1,mbs=1"), 0.40, 0.58),
        (case("gpt3-175b", "dgx-b200", "megatron-core", Bf16, [64, 2048, 256], "tp=4,pp=4,vpp=6,dp_shard=4,zero=1,mbs=2"), 0.33, 0.55),
        (case("gpt3-175b", "dgx-b200", "megatron-core", Fp8, [64, 2048, 256], "tp=4,pp=4,vpp=6,dp_shard=4,zero=1,mbs=2"), 0.22, 0.45),
        (case("llama3.1-405b", "gb200-nvl72", "nemo", Bf16, [144, 8192, 144], "tp=8,pp=9,vpp=7,dp_shard=2,zero=1,mbs=1"), 0.36, 0.55),
        (case("llama3-70b", "mi300x", "megatron-core", Bf16, [64, 8192, 128], "tp=8,pp=4,dp_shard=2,zero=1,mbs=1,recompute=full"), 0.18, 0.35),
        // Their power limit keeps products at 54% and 64% of the peak at most.
        (case("llama3-8b", "mi300x", "megatron-core", Bf16, [8, 4096, 32], "dp_shard=8,zero=1,mbs=1"), 0.25, 0.45),
        (case("llama3-8b", "mi325x", "megatron-core", Bf16, [8, 4096, 32], "dp_shard=8,zero=1,mbs=1"), 0.30, 0.52),
        // Experts: grouped products and all-to-all cost a fifth at eight large experts, half or more at
        // 256 small ones whose tokens cross nodes.
        (case("mixtral-8x7b", "dgx-h100", "megatron-core", Bf16, [64, 4096, 256], "tp=1,pp=4,vpp=8,ep=8,dp_shard=16,zero=1,mbs=1"), 0.30, 0.52),
        (case("qwen3-30b-a3b", "dgx-h100", "megatron-core", Bf16, [32, 4096, 512], "tp=1,pp=1,ep=8,dp_shard=32,zero=1,mbs=1"), 0.15, 0.40),
        (case("deepseek-v3", "h800", "megatron-core", Bf16, [1024, 4096, 8192], "tp=2,pp=16,ep=64,dp_shard=32,zero=1,mbs=1,recompute=full"), 0.07, 0.30),
    ]
};

#[test]
fn what_does_not_fit_names_its_largest_part() {
    let rows = [
        ("tp1 pp1 mbs8 recompute=none", "saved activations"),
        ("tp1 pp1 zero0 mbs1 recompute=full", "optimizer: moments"),
    ];
    for (strategy, part) in rows {
        let prediction = predict(Case {
            model: "llama3-8b",
            cluster: "dgx-h100",
            runtime: "megatron-core",
            precision: Precision::Bf16,
            gpus: 8,
            seq_len: 8192,
            batch: 64,
            strategy,
        });
        let Fit::TooLarge { largest, .. } = prediction.fit else {
            panic!("{strategy} fits");
        };
        assert_eq!(largest, part, "{strategy}");
    }
}

#[test]
fn utilisation_is_what_such_systems_reach() {
    for (case, least, most) in CASES {
        let mfu = predict(case).mfu;
        assert!(
            (least..=most).contains(&mfu),
            "{case:?}: {:.1}% of the peak, expected {:.0}-{:.0}%",
            mfu * 100.0,
            least * 100.0,
            most * 100.0
        );
    }
}

const MODELS: [&str; 4] = ["llama2-7b", "llama3-8b", "mixtral-8x7b", "gpt3-175b"];
const CLUSTERS: [&str; 8] = [
    "dgx-a100",
    "dgx-h100",
    "dgx-h200",
    "dgx-b200",
    "gb200-nvl72",
    "h800",
    "mi300x",
    "l40s-node",
];
const LAYOUTS: [(&str, &str, u64); 4] = [
    ("megatron-core", "tp=8,pp=2,zero=1,mbs=1", 16),
    ("megatron-core", "tp=4,pp=1,zero=1,mbs=1", 4),
    ("fsdp2", "zero=3,mbs=1,recompute=full", 1),
    ("deepspeed", "zero=3,mbs=1,recompute=full", 1),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// No prediction is over the peak; at a fixed batch more devices are never slower than what the
    /// added traffic explains, and never more efficient than fewer. Only sums of gradients may make them 0.5% more efficient: twice as
    /// many devices add up shards half as large half as often. On A100s that each hold a sixteenth of Mixtral, 12 bytes for each weight
    /// in each of 31 micro-batches take 0.8% of the step, and half of that on twice as many.
    #[test]
    fn more_devices_are_faster_and_no_more_efficient(
        model in 0..MODELS.len(),
        cluster in 0..CLUSTERS.len(),
        layout in 0..LAYOUTS.len(),
        doublings in 0u32..3,
    ) {
        let (runtime, strategy, inner) = LAYOUTS[layout];
        let gpus = 16u64 << doublings;
        let at = |gpus: u64| {
            let text = format!("{strategy},dp_shard={}", gpus / inner);
            predict(Case {
                model: MODELS[model],
                cluster: CLUSTERS[cluster],
                runtime,
                precision: Precision::Bf16,
                gpus,
                seq_len: 2048,
                batch: 512,
                strategy: Box::leak(text.into_boxed_str()),
            })
        };
        let (few, many) = (at(gpus), at(2 * gpus));
        prop_assert!(few.mfu < 0.75 && few.mfu > 0.0, "{} of the peak", few.mfu);
        prop_assert!(many.step_time < few.step_time, "{:?} and {:?}", few.step_time, many.step_time);
        prop_assert!(
            many.tokens_per_s_per_gpu <= few.tokens_per_s_per_gpu * 1.005,
            "{} and {}", few.tokens_per_s_per_gpu, many.tokens_per_s_per_gpu
        );
    }
}

#[test]
fn messages_between_stages_hide_only_where_the_runtime_does_not_wait_for_them() {
    let exposed = |runtime, strategy| {
        let case = Case {
            model: "llama3-8b",
            cluster: "dgx-a100",
            runtime,
            precision: Precision::Bf16,
            gpus: 32,
            seq_len: 8192,
            batch: 64,
            strategy,
        };
        predict(case).breakdown.pp_exposed_s
    };
    let [switched_on, switched_off] = ["", "overlap=grad+param"].map(|overlap| {
        let strategy = format!("tp1 pp8 dp4 mbs1 recompute=full 1f1b {overlap}");
        exposed("megatron-core", String::leak(strategy))
    });
    assert_eq!(switched_on, switched_off);
    // Of 16 micro-batches. A rank at an end of the pipeline sends 64 MiB at 25 GB/s, and receives as much at once.
    let one_message = switched_on / 16.0;
    assert!((0.0027..0.0045).contains(&one_message), "{one_message}");
    let hidden = exposed("vescale", "tp1 pp8 dp4 mbs1 recompute=full 1f1b");
    assert!(hidden < switched_on / 3.0, "{hidden}, {switched_on}");
}

/// The step time of two layers of Mistral's widths with this window, on eight H100.
fn windowed(window: &str, seq_len: u64, runtime: &str, strategy: &str) -> f64 {
    let json = format!(
        r#"{{"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "num_hidden_layers": 2, "vocab_size": 512, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768, "sliding_window": {window}}}"#
    );
    let scenario = Scenario {
        model: catalog::hf::decode(&json, "test", "mistral").expect("a model"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: 8,
            seq_len,
            global_batch: 8,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    let plan = plans::grammar::parse(
        strategy,
        &scenario.model,
        &scenario.workload,
        &scenario.runtime,
    );
    let costs = CostModel::new(scenario).expect("priced");
    costs
        .predict(&plan.expect(strategy))
        .expect("priced")
        .step_time
        .0
}

/// A window makes no step slower, also where context parallelism divides the sequence.
#[test]
fn a_window_makes_no_step_slower() {
    for (runtime, strategy) in [
        ("megatron-core", "zero=1"),
        ("megatron-core", "cp=4,cp_kind=all_gather,recompute=full"),
        ("megatron-core", "cp=2,cp_kind=all_to_all"),
        ("vescale-cuda", "cp=4,cp_kind=ring"),
    ] {
        for seq_len in [1024, 4096, 5120, 6144, 8192, 12_288, 32_768] {
            let [with, without] =
                ["4096", "null"].map(|window| windowed(window, seq_len, runtime, strategy));
            // Where kernels are short, the time of a step is the host's.
            let long = seq_len > 16_384;
            assert!(
                with <= without && (with < without || !long),
                "{runtime}, {strategy}, {seq_len} tokens: {with} s with a window, {without} s without"
            );
        }
    }
}

/// GPT-2 XL under Megatron-Core.
fn gpt2_xl(cluster: &'static str, gpus: u64, strategy: &'static str) -> Prediction {
    predict(Case {
        model: "gpt2-xl",
        cluster,
        runtime: "megatron-core",
        precision: Precision::Fp16,
        gpus,
        seq_len: 1024,
        batch: 32,
        strategy,
    })
}

/// No fused attention runs on Volta, so softmax's results, their dropped copies and the mask are kept: 5 bytes for each score.
#[test]
fn scores_are_kept_on_volta() {
    let [volta, ampere] =
        ["dgx2-v100", "dgx-a100"].map(|cluster| gpt2_xl(cluster, 8, "dp8 zero1 mbs4"));
    let scores = 48 * 4 * 25 * 1024 * 1024;
    let more = volta.peak_memory.0 - ampere.peak_memory.0;
    assert!(more > 5 * scores, "{more} bytes more, {scores} scores");
}

/// A single GPU sends nothing, so it needs no buffers of communicators.
#[test]
fn one_gpu_has_no_communicators() {
    let [one, two] = [(1, "mbs1"), (2, "dp2 mbs1")].map(|(gpus, strategy)| {
        let items = gpt2_xl("dgx-a100", gpus, strategy).memory;
        let named = |item: &&plans::MemoryItem| item.name == "workspaces and communicators";
        items.iter().find(named).map_or(0, |item| item.bytes)
    });
    assert!(two > one && one > 0, "{one} and {two} bytes");
}
