//! No prediction may promise a kernel faster than its device's roofline, a message faster than its links, more model FLOPs than the peak
//! allows, or a better machine that is slower. The bounds are written here a second time, apart from the code that applies them to prices.

use catalog::runtime::AttentionKernel;
use catalog::{
    Architecture, Bytes, Cluster, DType, Fitted, Model, Precision, Window, Workload, WorkloadSizes,
};
use costmodel::price::{MemoryKind, TablePrices};
use costmodel::{CostError, CostModel, Scenario};
use dtensor::{AttentionShape, CollectiveKind, Pass};
use plans::{Group, Prediction};
use proptest::prelude::*;

/// Sums of floats are made in another order here.
const ROUNDING: f64 = 1.0 - 1e-9;

const CLUSTERS: [&str; 9] = [
    "dgx-h100",
    "dgx-a100",
    "dgx2-v100",
    "dgx-b200",
    "gb200-nvl72",
    "mi300x",
    "l40s-node",
    "h800",
    "dgx-h200",
];
const DTYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F8];
const PASSES: [Pass; 3] = [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight];
const KERNELS: [AttentionKernel; 4] = [
    AttentionKernel::Flash1,
    AttentionKernel::FlashTriton,
    AttentionKernel::Flash2TwoPass,
    AttentionKernel::CudnnOrFlash3,
];
const MEMORY: [MemoryKind; 6] = [
    MemoryKind::Pointwise,
    MemoryKind::NormForward,
    MemoryKind::Softmax,
    MemoryKind::CrossEntropy,
    MemoryKind::Permute,
    MemoryKind::Optimizer,
];
const MESSAGES: [CollectiveKind; 6] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::SendRecv,
    CollectiveKind::RingExchange,
];

/// Factors of peaks, memory bandwidth, scale-up, scale-out and power.
type Speeds = [f64; 5];

/// A cluster with its speeds multiplied.
fn cluster(name: &str, speeds: Speeds) -> Cluster {
    let mut cluster = catalog::load::cluster(name).expect("a preset");
    scale(&mut cluster, speeds);
    cluster
}

/// Many cases at once, because making a cluster's prices takes longer than asking them.
fn many<T: std::fmt::Debug>(of: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<T>> {
    proptest::collection::vec(of, 40)
}

fn scale(cluster: &mut Cluster, [clock, memory, near, far, power]: Speeds) {
    for peak in cluster.device.peak.values_mut() {
        peak.value.0 *= clock;
    }
    if let Some(stated) = &mut cluster.device.clock_mhz {
        *stated *= clock;
    }
    cluster.device.memory_bandwidth.value.0 *= memory;
    cluster.scale_up.bandwidth.value.0 *= near;
    cluster.scale_out.bandwidth.value.0 *= far;
    if let Some(watts) = &mut cluster.device.power_watts {
        *watts *= power;
    }
}

fn tables(cluster: &Cluster) -> TablePrices {
    TablePrices::new(cluster, 64, &Fitted::default()).expect("prices")
}

/// Sizes from 1 to 2^`most`; all magnitudes are equally likely.
fn size(most: u32) -> impl Strategy<Value = u64> {
    (0..most, 0.5f64..1.0).prop_map(|(bits, part)| ((2u64 << bits) as f64 * part) as u64)
}

fn speeds(from: f64, to: f64) -> impl Strategy<Value = Speeds> {
    let one = || from.ln()..to.ln();
    [one(), one(), one(), one(), one()].prop_map(|logs| logs.map(f64::exp))
}

/// Factors that make one speed better, or all of them.
fn better() -> impl Strategy<Value = Speeds> {
    (speeds(1.0, 3.0), 0usize..8).prop_map(|(all, only)| match only {
        0..5 => std::array::from_fn(|at| if at == only { all[at] } else { 1.0 }),
        _ => all,
    })
}

/// A kernel whose least work is known.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    what: What,
    dtype: DType,
    backward: bool,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Product(u64, [u64; 3], Pass),
    Batched(u64, [u64; 3]),
    Attention(AttentionShape, AttentionKernel),
    Memory(MemoryKind, u64),
}

fn attention() -> impl Strategy<Value = AttentionShape> {
    let window = proptest::option::of((1u64..20_000, 0usize..2));
    (1u64..5, 0u32..6, size(20), 16u64..257, window).prop_map(
        |(batch, heads, length, dim, window)| AttentionShape {
            batch,
            heads: 1 << heads,
            kv_heads: 1,
            q_len: length,
            kv_len: length,
            qk_dim: dim,
            v_dim: dim / 2 + 1,
            causal: true,
            window: window.map(|(n, kind)| [Window::Sliding, Window::Chunk][kind](n)),
        },
    )
}

fn kernel() -> impl Strategy<Value = Kernel> {
    let sizes = || [size(20), size(18), size(18)];
    let product = (0u32..5, sizes(), 0..PASSES.len())
        .prop_map(|(groups, sizes, pass)| What::Product(1 << groups, sizes, PASSES[pass]));
    let batched = (size(10), sizes()).prop_map(|(batch, sizes)| What::Batched(batch, sizes));
    let fused = (attention(), 0..KERNELS.len())
        .prop_map(|(shape, kernel)| What::Attention(shape, KERNELS[kernel]));
    let memory =
        (0..MEMORY.len(), size(36)).prop_map(|(kind, bytes)| What::Memory(MEMORY[kind], bytes));
    let what = prop_oneof![product, batched, fused, memory];
    (what, 0..DTYPES.len(), any::<bool>()).prop_map(|(what, dtype, backward)| Kernel {
        what,
        dtype: DTYPES[dtype],
        backward,
    })
}

impl Kernel {
    fn time(self, prices: &TablePrices) -> f64 {
        let Self {
            what,
            dtype,
            backward,
        } = self;
        let time = match what {
            What::Product(1, sizes, pass) => prices.gemm(sizes, dtype, pass),
            What::Product(groups, sizes, pass) => prices.grouped_gemm(groups, sizes, dtype, pass),
            What::Batched(batch, sizes) => prices.batched_gemm(batch, sizes, dtype),
            What::Attention(shape, kernel) => prices.attention(&shape, kernel, dtype, backward),
            What::Memory(kind, bytes) => prices.memory_bound(kind, Bytes(bytes)),
        };
        time.0
    }

    /// FLOPs and bytes that cannot be avoided. A query attends to the keys before it and itself; a
    /// backward computes scores again.
    fn least(self) -> [f64; 2] {
        let float = |sizes: [u64; 3]| sizes.map(|size| size as f64);
        let bytes = self.dtype.size() as f64;
        match self.what {
            What::Product(_, sizes, _) => {
                let [m, n, k] = float(sizes);
                [2.0 * m * n * k, bytes * (m * k + k * n + m * n)]
            }
            What::Batched(batch, sizes) => {
                let [m, n, k] = float(sizes);
                let batch = batch as f64;
                [
                    2.0 * batch * m * n * k,
                    batch * bytes * (m * k + k * n + m * n),
                ]
            }
            What::Attention(s, _) => {
                let length = s.kv_len as f64;
                // The mean is counted query by query where windows are defined.
                let seen = s.window.unwrap_or(Window::Sliding(s.kv_len));
                let pairs = seen.mean(s.kv_len) * length;
                let (qk, v) = (s.qk_dim as f64, s.v_dim as f64);
                let products = if self.backward {
                    3.0 * qk + 2.0 * v
                } else {
                    qk + v
                };
                let lines = s.batch as f64 * s.heads as f64;
                [
                    2.0 * lines * pairs * products,
                    lines * length * (qk + v) * bytes,
                ]
            }
            What::Memory(_, bytes) => [0.0, bytes as f64],
        }
    }
}

/// Least seconds of a message: its bytes over the links that carry them. Switches of a domain may
/// form sums.
fn wire(cluster: &Cluster, Message { kind, bytes, group }: Message) -> f64 {
    let (ranks, bytes) = (group.size as f64, bytes as f64);
    let together = group.ranks_per_domain(cluster.domain(64)) as f64;
    let (near, far) = (
        cluster.scale_up.bandwidth.value.0,
        cluster.scale_out.bandwidth.value.0,
    );
    // A full mesh of direct links has one for every pair.
    let mesh = cluster.device.architecture == Architecture::Cdna3;
    let peers = (cluster.scale_up_domain - 1) as f64;
    let near_to = |others: f64| if mesh { near * others / peers } else { near };
    let sums = if cluster.in_switch_reduction {
        1.0
    } else {
        2.0
    };
    let (inside, across) = match kind {
        CollectiveKind::AllReduce => (sums / ranks, 2.0 / ranks / together),
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => {
            (1.0 / ranks, 1.0 / ranks / together)
        }
        CollectiveKind::AllToAll => (1.0 / ranks, 1.0 / ranks),
        CollectiveKind::SendRecv | CollectiveKind::RingExchange => {
            return bytes / if together < ranks { far } else { near_to(1.0) };
        }
    };
    let inside = inside * bytes * (together - 1.0) / near_to((together - 1.0).max(1.0));
    inside.max(across * bytes * (ranks - together) / far)
}

/// A message of a group.
#[derive(Clone, Copy, Debug)]
struct Message {
    kind: CollectiveKind,
    bytes: u64,
    group: Group,
}

fn message() -> impl Strategy<Value = Message> {
    let sizes = (0..MESSAGES.len(), size(36), 1u32..8, 0u32..7);
    sizes.prop_map(|(kind, bytes, size, stride)| Message {
        kind: MESSAGES[kind],
        bytes,
        group: Group {
            size: 1 << size,
            stride: 1 << stride,
        },
    })
}

impl Message {
    fn time(self, prices: &TablePrices) -> f64 {
        let Self { kind, bytes, group } = self;
        prices.collective(kind, Bytes(bytes), group).0
    }
}

/// Settings for this number of cases, the same in every run.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        max_global_rejects: 100 * cases,
        rng_seed: proptest::test_runner::RngSeed::Fixed(19),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn no_kernel_beats_its_roofline(
        name in 0..CLUSTERS.len(),
        speeds in speeds(0.2, 5.0),
        kernels in many(kernel()),
    ) {
        let cluster = cluster(CLUSTERS[name], speeds);
        let prices = tables(&cluster);
        for kernel in kernels {
            let time = kernel.time(&prices);
            let [flops, bytes] = kernel.least();
            let peak = cluster.device.peak_rate(kernel.dtype).expect("a peak").0;
            let least = (flops / peak).max(bytes / cluster.device.memory_bandwidth.value.0);
            prop_assert!(time.is_finite() && time >= least * ROUNDING, "{kernel:?}: {time} of at least {least}");
        }
    }

    /// A window leaves keys out, whichever part of a sequence a rank has.
    #[test]
    fn a_window_makes_no_attention_slower(
        name in 0..CLUSTERS.len(),
        shapes in many((attention(), 0u32..5, 0..KERNELS.len(), any::<bool>())),
    ) {
        let prices = tables(&cluster(CLUSTERS[name], [1.0; 5]));
        for (shape, ranks, kernel, backward) in shapes {
            let q_len = (shape.q_len >> ranks).max(1);
            let [with, without] = [shape.window, None].map(|window| {
                let shape = AttentionShape { q_len, window, ..shape };
                prices.attention(&shape, KERNELS[kernel], DType::Bf16, backward).0
            });
            prop_assert!(with * ROUNDING <= without, "{shape:?}, {q_len} queries: {with}, {without} without");
        }
    }

    #[test]
    fn no_message_beats_its_wire(
        name in 0..CLUSTERS.len(),
        speeds in speeds(0.2, 5.0),
        in_switch in any::<bool>(),
        messages in many(message()),
    ) {
        let mut cluster = cluster(CLUSTERS[name], speeds);
        cluster.in_switch_reduction &= in_switch;
        let prices = tables(&cluster);
        for message in messages {
            let time = message.time(&prices);
            let least = wire(&cluster, message);
            prop_assert!(time.is_finite() && time >= least * ROUNDING, "{message:?}: {time} of at least {least}");
        }
    }

    /// More clock, memory bandwidth, link bandwidth or power makes no kernel and no message slower.
    #[test]
    fn a_better_machine_makes_no_kernel_slower(
        name in 0..CLUSTERS.len(),
        start in speeds(0.3, 3.0),
        better in better(),
        kernels in many(kernel()),
        messages in many(message()),
    ) {
        let slow = cluster(CLUSTERS[name], start);
        let mut fast = slow.clone();
        scale(&mut fast, better);
        let both = [tables(&slow), tables(&fast)];
        for kernel in kernels {
            let [before, after] = both.each_ref().map(|prices| kernel.time(prices));
            prop_assert!(after * ROUNDING <= before, "{kernel:?}: {after} after {before}");
        }
        for message in messages {
            let [before, after] = both.each_ref().map(|prices| message.time(prices));
            prop_assert!(after * ROUNDING <= before, "{message:?}: {after} after {before}");
        }
    }
}

const PRECISIONS: [Precision; 4] = [
    Precision::Fp32,
    Precision::Fp16,
    Precision::Bf16,
    Precision::Fp8,
];
const RUNTIMES: [&str; 5] = [
    "megatron-core",
    "nemo",
    "fsdp2",
    "deepspeed",
    "vescale-cuda",
];
const REST: [&str; 7] = [
    "",
    "zero=1",
    "zero=2",
    "zero=3",
    "recompute=full",
    "recompute=selective",
    "cp=2",
];

/// A decoder of random sizes: dense or of experts, with or without a window.
fn model() -> impl Strategy<Value = Model> {
    let sizes = (0u32..7, 1u64..5, 0u32..4, 1u64..9, 9u32..17);
    (sizes, 0usize..3, 6u32..14).prop_map(|((heads, dim, groups, layers, vocab), kind, window)| {
        let heads = 1u64 << heads;
        let hidden = heads * dim * 32;
        let kind = ["llama", "mistral", "mixtral"][kind];
        decoded(kind, &format!(
            r#""hidden_size": {hidden}, "num_attention_heads": {heads}, "num_key_value_heads": {},
               "intermediate_size": {}, "num_hidden_layers": {layers}, "vocab_size": {},
               "sliding_window": {}{}"#,
            (heads >> groups).max(1),
            hidden * 3,
            1u64 << vocab,
            if kind == "mistral" { (1u64 << window).to_string() } else { "null".to_owned() },
            if kind == "mixtral" { r#", "num_local_experts": 8, "num_experts_per_tok": 2"# } else { "" },
        ))
    })
}

fn decoded(kind: &str, fields: &str) -> Model {
    let json = format!(
        r#"{{"model_type": "{kind}", "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, {fields}}}"#
    );
    catalog::hf::decode(&json, "test", kind).expect("a model")
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

fn plan() -> impl Strategy<Value = String> {
    let mesh = (0u32..4, 0u32..3, 0u32..3, 0..REST.len());
    mesh.prop_map(|(tp, pp, mbs, rest)| {
        format!(
            "tp={},pp={},mbs={},{}",
            1 << tp,
            1 << pp,
            1 << mbs,
            REST[rest]
        )
        .trim_end_matches(',')
        .to_owned()
    })
}

fn predicted(scenario: Scenario, plan: &plans::Strategy) -> Result<Prediction, CostError> {
    CostModel::new(scenario)?.predict(plan)
}

proptest! {
    #![proptest_config(cases(400))]

    /// Whatever is trained, on whatever machine, the model FLOPs of a step fit in its time; and a better
    /// machine runs the same plan no slower.
    #[test]
    fn no_step_beats_the_peak_and_a_better_machine_is_never_slower(
        model in model(),
        name in 0..CLUSTERS.len(),
        start in speeds(0.3, 3.0),
        better in better(),
        runtime in 0..RUNTIMES.len(),
        precision in 0..PRECISIONS.len(),
        (seq_len, batch) in (4u32..21, 5u32..8),
        plan in plan(),
    ) {
        let workload = WorkloadSizes {
            gpus: 32,
            seq_len: 1 << seq_len,
            global_batch: 1 << batch,
            precision: PRECISIONS[precision],
        };
        let cluster = cluster(CLUSTERS[name], start);
        let Some((scenario, plan)) = scenario(model, cluster, RUNTIMES[runtime], workload, &plan) else {
            return Err(TestCaseError::reject("not legal"));
        };
        let mut faster = scenario.clone();
        scale(&mut faster.cluster, better);
        faster.cluster.device.memory.value = Bytes(faster.cluster.device.memory.value.0 * 2);
        let (Ok(p), Ok(after)) = (predicted(scenario, &plan), predicted(faster, &plan)) else {
            return Err(TestCaseError::reject("not traced"));
        };
        prop_assert!(p.mfu > 0.0 && p.mfu <= 1.0, "{plan}: {}", p.mfu);
        prop_assert!(p.mfu <= p.mfu_palm * (1.0 + 1e-9), "{} {}", p.mfu, p.mfu_palm);
        prop_assert!(after.step_time.0 * ROUNDING <= p.step_time.0, "{plan}: {} after {}", after.step_time, p.step_time);
        prop_assert!(after.fit.fits() || !p.fit.fits());
    }
}

/// Predicts a preset under a plan.
fn preset(
    model: &str,
    cluster: &str,
    runtime: &str,
    workload: WorkloadSizes,
    text: &str,
) -> Prediction {
    let model = catalog::load::model(model).expect("a preset");
    let cluster = catalog::load::cluster(cluster).expect("a preset");
    let (scenario, plan) = scenario(model, cluster, runtime, workload, text).expect(text);
    predicted(scenario, &plan).expect("priced")
}

/// Half the table's power, and peaks from below the table's to above it.
#[test]
fn a_higher_peak_at_the_same_power_is_no_slower() {
    let times = (80..120).map(|percent| {
        let part = cluster("dgx-h100", [f64::from(percent) / 100.0, 1.0, 1.0, 1.0, 0.5]);
        let prices = tables(&part);
        prices.gemm([8192; 3], DType::Bf16, Pass::Forward).0
    });
    let times: Vec<f64> = times.collect();
    assert!(
        times.is_sorted_by(|slow, fast| fast * ROUNDING <= *slow),
        "{times:?}"
    );
}

#[test]
fn products_in_32_bits_take_what_32_bit_units_take() {
    for (name, slower) in [
        ("dgx2-v100", 125.0 / 15.7),
        ("dgx-a100", 2.0),
        ("dgx-h100", 2.0),
    ] {
        let prices = tables(&cluster(name, [1.0; 5]));
        let price = |dtype| prices.gemm([8192, 4096, 4096], dtype, Pass::Forward).0;
        let ratio = price(DType::F32) / price(DType::F16);
        assert!((ratio / slower - 1.0).abs() < 0.3, "{name}: {ratio}");
        let batched = |dtype| prices.batched_gemm(64, [4096, 4096, 128], dtype).0;
        let ratio = batched(DType::F32) / batched(DType::F16);
        assert!((ratio / slower - 1.0).abs() < 0.3, "{name}: {ratio}");
    }
    let workload = WorkloadSizes {
        gpus: 32,
        seq_len: 4096,
        global_batch: 64,
        precision: Precision::Fp32,
    };
    let p = preset(
        "llama3-8b",
        "dgx2-v100",
        "megatron-core",
        workload,
        "tp=8,zero=1",
    );
    assert!(p.mfu < 0.9, "{:.1}% of 15.7 TFLOP/s", p.mfu * 100.0);
}

/// Attention in 32 bits runs at the 32-bit rate, whether it is one fused kernel or two products.
#[test]
fn attention_in_32_bits_is_priced_in_32_bits() {
    let workload = |precision| WorkloadSizes {
        gpus: 64,
        seq_len: 131_072,
        global_batch: 64,
        precision,
    };
    for (runtime, text) in [
        ("megatron-core", "tp=8,cp=8"),
        ("fsdp2", "tp=8,cp=8,zero=3"),
    ] {
        let predict =
            |precision| preset("llama3-8b", "dgx-h100", runtime, workload(precision), text);
        let [wide, half] = [Precision::Fp32, Precision::Bf16].map(predict);
        assert!(wide.mfu < 1.0 && half.mfu < 1.0);
        let attention = |p: &Prediction| -> f64 {
            let of = p.kernels.iter().filter(|k| {
                k.name.contains("fused attention") || k.name.contains("batched matmul")
            });
            of.map(|k| k.seconds).sum()
        };
        let ratio = attention(&wide) / attention(&half);
        assert!(ratio > 1.9, "{runtime}: {ratio}");
    }
}

/// With a million tokens attention is nearly all work, and half of its scores are masked.
#[test]
fn long_sequences_stay_below_the_peak() {
    let workload = WorkloadSizes {
        gpus: 256,
        seq_len: 1 << 20,
        global_batch: 4,
        precision: Precision::Bf16,
    };
    let p = preset(
        "llama3-8b",
        "dgx-h100",
        "megatron-core",
        workload,
        "tp=8,cp=32,recompute=full",
    );
    assert!(p.mfu < 0.7, "{}", p.mfu);
    assert!(
        (p.mfu_palm / p.mfu - 2.0).abs() < 0.1,
        "{} {}",
        p.mfu,
        p.mfu_palm
    );
    assert_eq!(p.mfu_palm_beside(), Some(p.mfu_palm));
}
