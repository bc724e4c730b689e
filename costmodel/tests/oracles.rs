//! The cost model against published memory reports and against its own invariants.

use catalog::{Bytes, Precision, Workload};
use costmodel::{CostModel, Scenario};
use plans::Strategy as Plan;
use proptest::prelude::*;

const MIB: f64 = 1048576.0;

fn scenario(model: &str, gpus: u64, seq_len: u64, global_batch: u64, runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len,
            global_batch,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn strategy(s: &Scenario, text: &str) -> Plan {
    plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text)
}

fn named(costs: &CostModel, strategy: &Plan, parts: &[&str]) -> f64 {
    let prediction = costs.predict(strategy).expect("priced");
    let wanted = |name: &str| parts.iter().any(|p| name.starts_with(p));
    let bytes: u64 = prediction
        .memory
        .iter()
        .filter(|m| wanted(&m.name))
        .map(|m| m.bytes)
        .sum();
    bytes as f64 / MIB
}

const STATES: [&str; 3] = ["parameters", "gradients", "optimizer"];

/// Megatron-LM's `theoretical_memory_usage.py` for Llama 3 70B on 512 GPUs (sequence 4096,
/// micro-batch 1, vocabulary 128,256, distributed optimizer): the report prints MiB.
#[test]
fn megatron_states_of_llama_70b() {
    let s = scenario("llama3-70b", 512, 4096, 512, "megatron-core");
    let costs = CostModel::new(s.clone()).expect("priced");
    let check = |text: &str, reported: f64| {
        let ours = named(&costs, &strategy(&s, text), &STATES);
        // The report spreads the padded vocabulary's rows and the norms' replicated weights over
        // tensor ranks; we hold norms whole: 2·h per layer, under 0.1%.
        assert!(
            (ours / reported - 1.0).abs() < 1e-3,
            "{text}: {ours} MiB, reported {reported}"
        );
    };
    check("tp=8,pp=8,recompute=selective", 8590.6);
    check("tp=8,pp=4,vpp=5,recompute=selective", 14617.6);
}

/// The same report's activations: `s·b·h·(18 + 4·ffn/h)` per layer over `tp`, times the layers in
/// flight, and the embedding's `8·s·b·p + s·b·h·p`. Trace less formula is a named list, to the byte.
#[test]
fn megatron_activations_of_llama_70b() {
    let s = scenario("llama3-70b", 512, 4096, 512, "megatron-core");
    let costs = CostModel::new(s.clone()).expect("priced");
    let (seq, h, ffn, tp) = (4096.0, 8192.0, 28672.0, 8.0);
    let report_layer = seq * h * (18.0 + 4.0 * ffn / h) / tp;
    let check = |text: &str, in_flight_layers: f64, reported: f64| {
        let pp = if text.contains("pp=8") { 8.0 } else { 4.0 };
        // The report's own total, as a check of its restatement.
        let embedding = (8.0 * seq * pp + seq * h * pp) / tp;
        let restated = (report_layer * in_flight_layers + embedding) / MIB;
        assert!(
            (restated / reported - 1.0).abs() < 5e-3,
            "{text}: {restated}, reported {reported}"
        );
        let saved = named(&costs, &strategy(&s, text), &["saved activations"]);
        let named_difference = [
            // SwiGLU keeps gate, up and product; the report counts two tensors of width ffn.
            2.0 * ffn,
            // Llama has no dropout; the report counts two one-byte masks.
            -2.0 * h,
            // 8 key/value heads of 64; the report counts full keys and values.
            -(4.0 - 0.5) * h,
            // One 32-bit statistic per token and norm.
            8.0,
        ];
        let layer = report_layer + seq / tp * named_difference.iter().sum::<f64>();
        let ours = layer * in_flight_layers / MIB;
        assert!(
            (saved - ours).abs() < 1e-6,
            "{text}: {saved} against {ours}"
        );
    };
    check("tp=8,pp=8,recompute=selective", 80.0, 10272.0);
    check(
        "tp=8,pp=4,vpp=5,recompute=selective",
        80.0 * (1.0 + 3.0 / 20.0),
        11794.4,
    );
}

/// Selective recomputation drops exactly the scores: 5·a·s²·b over `tp` per layer, and keeps 34·s·b·h.
#[test]
fn selective_recomputation_drops_the_scores() {
    let s = scenario("megatron-22b", 8, 2048, 4, "megatron-2022");
    let costs = CostModel::new(s.clone()).expect("priced");
    let saved = |text: &str| named(&costs, &strategy(&s, text), &["saved activations"]) * MIB;
    let none = saved("tp=8,mbs=4,recompute=none");
    let selective = saved("tp=8,mbs=4,recompute=selective");
    let (layers, heads, seq, batch, h, tp) = (48.0, 64.0, 2048.0, 4.0, 6144.0, 8.0);
    assert_eq!(
        none - selective,
        layers * 5.0 * heads * seq * seq * batch / tp
    );
    let full = saved("tp=8,mbs=4,recompute=full");
    // Full keeps each layer's input, 2·s·b·h over tp under sequence parallelism; the two norms'
    // statistics, 16 bytes per token, are beside the paper's 34.
    let layer = selective - full;
    let expected = layers * seq * batch / tp * ((34.0 - 2.0) * h + 16.0);
    assert_eq!(layer, expected);
}

/// Megatron's distributed optimizer: 6 + 12/d bytes per parameter; 18 without. A frozen one takes its 2 bytes alone.
#[test]
fn distributed_optimizer_bytes_per_parameter() {
    use costmodel::states::{Elements, Sharding, Weights};
    let types = catalog::load::runtime("megatron-core")
        .expect("preset")
        .states;
    for (zero, ranks, expected) in [
        (catalog::Zero::Z0, 1, 18.0),
        (catalog::Zero::Z1, 1, 18.0),
        (catalog::Zero::Z1, 4, 6.0 + 12.0 / 4.0),
        (catalog::Zero::Z1, 64, 6.0 + 12.0 / 64.0),
        (catalog::Zero::Z2, 4, 2.0 + 16.0 / 4.0),
        (catalog::Zero::Z3, 4, 18.0 / 4.0),
    ] {
        let sharding = Sharding {
            zero,
            dense: ranks,
            expert: 1,
        };
        let elements = Elements {
            dense: 1 << 20,
            expert: 0,
        };
        let per_element = |weights: Weights| {
            let bytes = sharding.states(weights, &types, Precision::Bf16).total();
            bytes.as_f64() / (1u64 << 20) as f64
        };
        let trained = Weights {
            trained: elements,
            ..Weights::default()
        };
        assert_eq!(per_element(trained), expected, "{zero:?} over {ranks}");
        let frozen = Weights {
            frozen: elements,
            ..Weights::default()
        };
        let held = if zero == catalog::Zero::Z3 {
            2.0 / ranks as f64
        } else {
            2.0
        };
        assert_eq!(per_element(frozen), held, "{zero:?} over {ranks}");
    }
}

/// On our own device 8 bits make products faster than their casts make a step slower, and keep nothing else.
#[test]
fn eight_bits_cost_their_casts() {
    let scenario = |precision| {
        let mut s = scenario("llama3-8b", 8, 8192, 64, "vescale-cuda");
        let sizes = catalog::WorkloadSizes {
            precision,
            ..*s.workload
        };
        s.workload = Workload::new(sizes).expect("a workload");
        s
    };
    let predict = |precision| {
        let s = scenario(precision);
        let costs = CostModel::new(s.clone()).expect("priced");
        let strategy = strategy(&s, "dp_shard=8,zero=3,recompute=full");
        costs.predict(&strategy).expect("priced")
    };
    let [wide, narrow] = [Precision::Bf16, Precision::Fp8].map(predict);
    let ratio = wide.step_time / narrow.step_time;
    // Products are about two thirds of a step and run at up to twice the rate.
    assert!(1.05 < ratio && ratio < 1.5, "{ratio}");
    let kept = |p: &plans::Prediction| {
        let parts = p
            .memory
            .iter()
            .filter(|m| STATES.iter().any(|s| m.name.starts_with(s)));
        parts.map(|m| m.bytes).sum::<u64>()
    };
    assert_eq!(kept(&wide), kept(&narrow));
}

fn mesh() -> impl proptest::strategy::Strategy<Value = (u64, u64, u64, u64)> {
    (0u32..4, 0u32..3, 0u32..2, 0u32..2)
        .prop_map(|(tp, pp, mbs, cp)| (1 << tp, 1 << pp, 1 << mbs, 1 << cp))
}

fn text((tp, pp, mbs, cp): (u64, u64, u64, u64), rest: &str) -> String {
    format!("tp={tp},pp={pp},mbs={mbs},cp={cp},{rest}")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn higher_zero_levels_hold_less(mesh in mesh()) {
        let s = scenario("llama3-8b", 64, 4096, 128, "vescale");
        let costs = CostModel::new(s.clone()).expect("priced");
        let memory: Vec<f64> = (0..4)
            .map(|z| named(&costs, &strategy(&s, &text(mesh, &format!("zero={z}"))), &STATES))
            .collect();
        prop_assert!(memory.windows(2).all(|w| w[1] <= w[0]), "{:?}", memory);
        prop_assert!(memory[3] < memory[0]);
    }

    #[test]
    fn gradients_scale_with_tensor_and_pipeline_sizes(tp in 0u32..4, pp in 0u32..3) {
        let s = scenario("llama3-8b", 64, 4096, 128, "vescale");
        let costs = CostModel::new(s.clone()).expect("priced");
        let (tp, pp) = (1u64 << tp, 1u64 << pp);
        let bytes = named(&costs, &strategy(&s, &text((tp, pp, 1, 1), "zero=0")), &["gradients"]) * MIB;
        // The heaviest rank also holds embedding or head; its layers are 1/pp of them.
        let layers = 32.0 * 218_112_000.0 / pp as f64;
        let vocabulary = 128_256.0 * 4096.0 * if pp == 1 { 2.0 } else { 1.0 };
        let expected = 4.0 * (layers + vocabulary) / tp as f64;
        prop_assert!((bytes / expected - 1.0).abs() < 1e-3, "{} {}", bytes, expected);
    }

    #[test]
    fn floors_never_exceed_the_simulation(mesh in mesh(), zero in 0u8..4, kind in 0usize..6, again in 0usize..5) {
        let s = scenario("llama3-8b", 64, 4096, 128, "vescale");
        let costs = CostModel::new(s.clone()).expect("priced");
        let kinds = ["1f1b", "interleaved,vpp=2", "gpipe", "zb-h1", "zb-v,vpp=2", "dualpipe-v,vpp=2"];
        let recompute = ["none", "selective", "full", "layers:2", "falling:1"][again];
        let rest = format!("zero={zero},recompute={recompute},schedule={}", kinds[kind]);
        if let Ok(one) = plans::grammar::parse(&text(mesh, &rest), &s.model, &s.workload, &s.runtime) {
            let passes = costs.passes(&one).expect("priced");
            let floors = costs.floors(&one, passes, None).expect("priced");
            let score = costs.score(&one).expect("priced");
            prop_assert!(floors.time.0 <= score.step_time.0, "{}: {:?} {:?}", one, floors, score);
            prop_assert!(floors.memory <= score.peak_memory, "{}: {:?} {:?}", one, floors, score);
        }
    }

    #[test]
    fn floors_hold_for_every_depth_of_prefetching(mesh in mesh(), runtime in 0usize..5, layers in any::<bool>()) {
        let (runtime, depth) = [("fsdp2", 1), ("fsdp2", 2), ("fsdp1", 0), ("deepspeed", 0), ("deepspeed", 2)][runtime];
        let s = scenario("llama3-8b", 64, 4096, 128, runtime);
        let costs = CostModel::new(s.clone()).expect("priced");
        let recompute = if layers { "layers:2" } else { "full" };
        let rest = format!("zero=3,recompute={recompute},prefetch={depth}");
        let one = plans::grammar::parse(&text(mesh, &rest), &s.model, &s.workload, &s.runtime).expect("legal");
        prop_assert_eq!(one.prefetch.unwrap_or(1), depth);
        let passes = costs.passes(&one).expect("priced");
        let floors = costs.floors(&one, passes, None).expect("priced");
        let score = costs.score(&one).expect("priced");
        prop_assert!(floors.time.0 <= score.step_time.0, "{}: {:?} {:?}", one, floors, score);
        prop_assert!(floors.memory <= score.peak_memory, "{}: {:?} {:?}", one, floors, score);
    }

    #[test]
    fn parts_sum_to_the_whole(mesh in mesh(), zero in 0u8..4) {
        let s = scenario("llama3-8b", 64, 4096, 128, "vescale");
        let costs = CostModel::new(s.clone()).expect("priced");
        let p = costs.predict(&strategy(&s, &text(mesh, &format!("zero={zero}")))).expect("priced");
        let b = p.breakdown;
        let sum = b.compute_s + b.recompute_s + b.tp_exposed_s + b.cp_exposed_s + b.ep_exposed_s
            + b.dp_exposed_s + b.pp_exposed_s + b.bubble_s + b.optimizer_s + b.host_s + b.offload_exposed_s
            + b.imbalance_s;
        prop_assert!((sum / p.step_time.0 - 1.0).abs() < 1e-6);
        prop_assert_eq!(p.memory.iter().map(|m| m.bytes).sum::<u64>(), p.peak_memory.0);
        let average = p.memory_by_rank.iter().map(|m| m.0).sum::<u64>() / p.memory_by_rank.len() as u64;
        prop_assert!(p.peak_memory.0 >= average);
    }

    #[test]
    fn a_faster_machine_is_never_slower(mesh in mesh(), link in 1.0f64..4.0, hbm in 1.0f64..3.0) {
        let s = scenario("llama3-8b", 64, 4096, 128, "vescale");
        let mut faster = s.clone();
        faster.cluster.scale_up.bandwidth.value.0 *= link;
        faster.cluster.scale_out.bandwidth.value.0 *= link;
        faster.cluster.device.memory_bandwidth.value.0 *= hbm;
        let one = strategy(&s, &text(mesh, "zero=1"));
        let before = CostModel::new(s).expect("priced").score(&one).expect("priced");
        let after = CostModel::new(faster).expect("priced").score(&one).expect("priced");
        prop_assert!(after.step_time.0 <= before.step_time.0 * (1.0 + 1e-9));
    }
}

#[test]
fn full_recomputation_trades_memory_for_time() {
    let s = scenario("llama3-8b", 8, 8192, 64, "megatron-core");
    let costs = CostModel::new(s.clone()).expect("priced");
    let none = costs.score(&strategy(&s, "tp=8")).expect("priced");
    let full = costs
        .score(&strategy(&s, "tp=8,recompute=full"))
        .expect("priced");
    assert!(full.peak_memory < none.peak_memory && full.step_time > none.step_time);
    assert!(none.peak_memory > Bytes(0));
}

/// Every block gathered ahead takes as much memory as the largest block has in the type of kernels, and spares time where gathers
/// are waited for.
#[test]
fn prefetching_trades_memory_for_time() {
    let s = scenario("llama3-8b", 64, 4096, 64, "deepspeed");
    let costs = CostModel::new(s.clone()).expect("priced");
    let of = |depth: u64| {
        let text = format!("dp=64,mbs=1,zero=3,recompute=none,prefetch={depth}");
        costs.predict(&strategy(&s, &text)).expect("priced")
    };
    let [none, one, two] = [0, 1, 2].map(of);
    let names: Vec<(&str, u64)> = one
        .memory
        .iter()
        .map(|m| (m.name.as_str(), m.bytes))
        .collect();
    let in_flight = |p: &plans::Prediction| {
        let part = p.memory.iter().find(|m| m.name.contains("gathered"));
        part.unwrap_or_else(|| panic!("{names:?}")).bytes
    };
    // The head and the table are the largest blocks: 128,256 rows of 4096 numbers of 16 bits.
    let largest = 2 * 128_256 * 4096;
    assert!((in_flight(&one) - in_flight(&none)).abs_diff(largest) < largest / 1000);
    assert_eq!(
        in_flight(&two) - in_flight(&one),
        in_flight(&one) - in_flight(&none)
    );
    assert!(none.step_time > one.step_time && one.step_time >= two.step_time);
}
