//! Packed and padded sequences: what documents of different lengths cost, and how long ranks wait for the longest.

use catalog::profile::{Machine, Profile};
use catalog::{Lengths, Packing, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

const SEQ: u64 = 4096;

fn scenario(model: &str, gpus: u64, documents: Option<(&str, Packing)>) -> Scenario {
    let sizes = WorkloadSizes {
        gpus,
        seq_len: SEQ,
        global_batch: 64,
        precision: Precision::Bf16,
    };
    let mut workload = Workload::new(sizes).expect("a workload");
    if let Some((lengths, packing)) = documents {
        let lengths: Lengths = lengths.parse().expect(lengths);
        workload = workload.of_documents(lengths, packing).expect("documents");
    }
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime("megatron-core").expect("preset"),
        workload,
        headroom: 0.0,
    }
}

fn predicted(s: &Scenario, strategy: &str) -> Prediction {
    let costs = CostModel::new(s.clone()).expect("priced");
    let parsed = plans::grammar::parse(strategy, &s.model, &s.workload, &s.runtime);
    costs.predict(&parsed.expect(strategy)).expect("priced")
}

fn llama_on(gpus: u64, documents: Option<(&str, Packing)>, strategy: &str) -> Prediction {
    predicted(&scenario("llama3-8b", gpus, documents), strategy)
}

fn packed_within(lengths: &str, gpus: u64, strategy: &str) -> Prediction {
    llama_on(gpus, Some((lengths, Packing::Within)), strategy)
}

/// Total time of the attention kernels of a step, in seconds.
fn attention(p: &Prediction) -> f64 {
    let kernels = p
        .kernels
        .iter()
        .filter(|k| k.name.contains("fused attention"));
    kernels.map(|kernel| kernel.seconds).sum()
}

const STRATEGIES: [&str; 5] = [
    "tp=2,mbs=1",
    "tp=2,mbs=2,recompute=full",
    "pp=4,mbs=1",
    "tp=2,cp=4,mbs=1",
    "zero=3,mbs=1",
];

#[test]
fn one_document_per_sequence_is_what_was_predicted_before() {
    for strategy in STRATEGIES {
        let plain = llama_on(16, None, strategy);
        assert_eq!(packed_within("4k:1", 16, strategy), plain, "{strategy}");
        let across = Some(("512:0.7,4k:0.3", Packing::Across));
        assert_eq!(llama_on(16, across, strategy), plain, "{strategy}");
    }
}

#[test]
fn padding_is_paid_for_and_not_counted() {
    // Half of the sequences are full, half hold one document of a quarter: 5/8 of the tokens are real.
    let padded = Some(("1k:0.5,4k:0.5", Packing::Padded));
    for strategy in STRATEGIES {
        let (plain, padded) = (llama_on(16, None, strategy), llama_on(16, padded, strategy));
        assert_eq!(padded.step_time, plain.step_time);
        assert_eq!(padded.breakdown, plain.breakdown);
        let share = padded.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu;
        assert!((share - 0.625).abs() < 1e-12, "{share}");
        assert!(padded.mfu < plain.mfu * 0.625);
    }
}

/// Under the Trainer attention gets padding as a mask: each of 32 layers keeps 2 bytes of it for every pair of tokens, and copies of keys
/// and values, with 128 numbers each, for the 24 query heads that share another's. Sequences that are full need no mask.
#[test]
fn pytorch_gets_padding_as_a_mask() {
    let of = |lengths: Option<&str>| {
        let documents = lengths.map(|lengths| (lengths, Packing::Padded));
        let s = Scenario {
            runtime: catalog::load::runtime("hf-trainer").expect("preset"),
            ..scenario("llama3-8b", 16, documents)
        };
        predicted(&s, "zero=3,mbs=1")
    };
    let saved = |p: &Prediction| p.memory_of("saved activations").0;
    let [plain, full, padded] = [None, Some("4k:1"), Some("1k:0.5,4k:0.5")].map(of);
    assert_eq!(full.step_time, plain.step_time);
    assert_eq!(saved(&full), saved(&plain));
    let more = 32 * 2 * (SEQ * SEQ + SEQ * 24 * 2 * 128);
    assert_eq!(saved(&padded) - saved(&plain), more);
    assert!(attention(&padded) > 1.5 * attention(&plain));
}

/// Documents of 512 and 4096 tokens, 8 to 1: each length has half of the tokens. Attention takes the mean of what it
/// takes with one length alone. The variance of a micro-batch of one sequence is the sum over both lengths of share ·
/// length / sequence · (half the difference)²; the larger of two normal variables exceeds their mean by 1/√π deviations.
#[test]
fn two_lengths_by_hand() {
    let (strategy, micro_batches) = ("mbs=1,zero=1", 32.0f64);
    let [short, long, both] =
        ["512:1", "4k:1", "512:8,4k:1"].map(|lengths| packed_within(lengths, 2, strategy));
    let [t_short, t_long, t_both] = [&short, &long, &both].map(attention);
    let mean = 0.5 * (t_short + t_long);
    assert!(
        (t_both / mean - 1.0).abs() < 1e-9,
        "{t_both} {mean} {t_short} {t_long} {:?}",
        both.kernels
    );
    assert!(
        t_short < t_long / 3.0 && t_short > t_long / 8.0,
        "{t_short} {t_long}"
    );

    let half = (t_long - t_short) / micro_batches / 2.0;
    let deviation = ((0.5 * 512.0 / 4096.0 + 0.5) * half * half).sqrt();
    let waits = deviation * micro_batches.sqrt() / std::f64::consts::PI.sqrt();
    let found = both.breakdown.imbalance_s;
    assert!((found / waits - 1.0).abs() < 1e-6, "{found} {waits}");
    assert_eq!(short.breakdown.imbalance_s, 0.0);

    // Model FLOPs of attention halve in the same way; those of everything else stay.
    let flops = |p: &Prediction| p.mfu * p.step_time.0;
    let mean = 0.5 * (flops(&short) + flops(&long));
    assert!((flops(&both) / mean - 1.0).abs() < 1e-12);
    assert_eq!(both.peak_memory, long.peak_memory);
    assert_eq!(both.memory, long.memory);
}

#[test]
fn parts_add_up_to_the_step() {
    for strategy in STRATEGIES {
        let p = packed_within("lognormal:mean=700,sigma=1", 16, strategy);
        let parts: f64 = planned(&p).iter().sum();
        assert!((parts / p.step_time.0 - 1.0).abs() < 1e-9, "{strategy}");
        assert!(p.breakdown.imbalance_s > 0.0, "{strategy}");
        assert!(p.breakdown.imbalance_s < 0.3 * p.step_time.0, "{strategy}");
    }
}

fn planned(p: &Prediction) -> [f64; 11] {
    let b = &p.breakdown;
    [
        b.compute_s,
        b.recompute_s,
        b.tp_exposed_s,
        b.cp_exposed_s,
        b.ep_exposed_s,
        b.dp_exposed_s,
        b.pp_exposed_s,
        b.bubble_s,
        b.optimizer_s,
        b.host_s,
        b.imbalance_s,
    ]
}

/// 512:8,2k:1 has as many squares as documents of 1,024 tokens alone, so equal FLOPs.
#[test]
fn more_imbalance_is_never_faster() {
    for strategy in STRATEGIES {
        let [even, uneven] =
            ["1k:1", "512:8,2k:1"].map(|lengths| packed_within(lengths, 16, strategy));
        let flops = |p: &Prediction| p.mfu_palm * p.step_time.0;
        assert!((flops(&even) / flops(&uneven) - 1.0).abs() < 1e-9);
        assert!(
            even.step_time.0 <= uneven.step_time.0 * (1.0 + 1e-9),
            "{strategy}"
        );
        assert_eq!(even.breakdown.imbalance_s, 0.0);
    }
    // More replicas wait longer, and so do those that wait for each other in every micro-batch.
    let lengths = "lognormal:mean=700,sigma=1";
    let waits = |gpus, strategy| packed_within(lengths, gpus, strategy).breakdown.imbalance_s;
    assert!(waits(32, "tp=8,mbs=1") * 0.5 < waits(16, "tp=8,mbs=1"));
    let share = |gpus, strategy| {
        let p = packed_within(lengths, gpus, strategy);
        p.breakdown.imbalance_s / attention(&p)
    };
    assert!(share(16, "tp=8,mbs=1") < share(32, "tp=8,mbs=1"));
    assert!(share(16, "tp=1,zero=1,mbs=1") < share(16, "tp=1,zero=3,mbs=1"));
    assert!(share(16, "tp=8,pp=1,mbs=1") < share(16, "tp=8,pp=2,mbs=1"));
}

#[test]
fn a_profile_has_no_attention_within_documents() {
    let mut s = scenario("llama3-8b", 16, Some(("1k:1", Packing::Within)));
    let profile = Profile {
        schema_version: 1,
        tool_version: String::new(),
        machine: Machine {
            processor: String::new(),
            cores: 1,
            memory_bytes: 1 << 30,
            gpu: None,
        },
        measured: Vec::new(),
    };
    s.cluster.profile = Some(profile.into());
    let wrong = CostModel::new(s).expect_err("refused").to_string();
    assert!(wrong.contains("--packing across"), "{wrong}");
}
