//! Compares the tables' prices with kernels measured on an H200, which were not used for the
//! tables.

use std::collections::BTreeMap;
use std::path::Path;

use catalog::profile::{Measured, Profile};
use catalog::runtime::AttentionKernel;
use catalog::{Bytes, DType, Fitted, Seconds};
use costmodel::price::{MemoryKind, TablePrices};
use dtensor::{AttentionShape, Pass};

/// Shorter kernels are left out, because their time is mostly the launch.
const SHORTEST: Seconds = Seconds(20e-6);

/// The price of a measured kernel, if the tables have one of its kind.
fn priced(prices: &TablePrices, measured: &Measured) -> Option<Seconds> {
    let name = measured.kernel.as_str();
    let product = |dtype, pass| {
        let sizes = measured.sizes[..].try_into();
        prices.gemm(sizes.expect("products have three sizes"), dtype, pass)
    };
    let attention = |backward| {
        let [lines, q_len, kv_len, dim] = measured.sizes[..].try_into().expect("four sizes");
        let shape = AttentionShape {
            batch: 1,
            heads: lines,
            kv_heads: lines,
            q_len,
            kv_len,
            qk_dim: dim,
            v_dim: dim,
            causal: true,
            window: None,
        };
        prices.attention(
            &shape,
            AttentionKernel::CudnnOrFlash3,
            DType::Bf16,
            backward,
        )
    };
    // Bytes of an element that a kernel must read and write.
    let moved = |kind, bytes: u64| {
        let elements: u64 = measured.sizes.iter().product();
        prices.memory_bound(kind, Bytes(elements * bytes))
    };
    let time = match name {
        "matmul forward bf16" => product(DType::Bf16, Pass::Forward),
        "matmul backward bf16" => product(DType::Bf16, Pass::BackwardInput),
        "matmul weight gradient bf16" => product(DType::Bf16, Pass::BackwardWeight),
        "matmul forward tf32" => product(DType::F32, Pass::Forward),
        "matmul backward tf32" => product(DType::F32, Pass::BackwardInput),
        "attention scores forward bf16" => attention(false),
        "attention context of input 0 backward bf16" => attention(true),
        "rms norm forward bf16" | "layer norm forward bf16" => moved(MemoryKind::NormForward, 4),
        "rms norm backward bf16" | "layer norm backward bf16" => moved(MemoryKind::NormBackward, 6),
        "add forward bf16" => moved(MemoryKind::Pointwise, 6),
        "silu tanh gated forward bf16" => moved(MemoryKind::Pointwise, 6),
        "silu tanh gated backward bf16" => moved(MemoryKind::Pointwise, 10),
        "cross-entropy forward f32" => moved(MemoryKind::Pointwise, 6),
        "adamw" => moved(MemoryKind::Optimizer, 30),
        "copy" => moved(MemoryKind::Pointwise, 8),
        _ => return None,
    };
    Some(time)
}

/// The lowest and the highest median error of the prices of a kind of kernel, in percent. Our own norms are slower than the
/// fused ones that the tables describe.
const MEDIANS: [(&str, [f64; 2]); 15] = [
    ("adamw", [-5.0, 5.0]),
    ("add forward bf16", [-5.0, 5.0]),
    ("attention context of input 0 backward bf16", [-10.0, 10.0]),
    ("attention scores forward bf16", [-15.0, 10.0]),
    ("copy", [-5.0, 5.0]),
    ("cross-entropy forward f32", [-10.0, 10.0]),
    ("layer norm backward bf16", [-60.0, 0.0]),
    ("layer norm forward bf16", [-60.0, 0.0]),
    ("matmul backward bf16", [-10.0, 10.0]),
    ("matmul backward tf32", [-20.0, 10.0]),
    ("matmul forward bf16", [-10.0, 10.0]),
    ("matmul forward tf32", [-20.0, 10.0]),
    ("matmul weight gradient bf16", [-10.0, 10.0]),
    ("silu tanh gated backward bf16", [-5.0, 5.0]),
    ("silu tanh gated forward bf16", [-5.0, 5.0]),
];

#[test]
fn tables_agree_with_a_measured_gpu() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu/profiles/h200.yaml");
    let text = std::fs::read_to_string(path).expect("is part of the repository");
    let profile = Profile::from_yaml(&text, "h200.yaml").expect("is a profile");
    let cluster = catalog::load::cluster("dgx-h200").expect("a preset");
    // The profile times each kernel alone, on a GPU at rest, so the constants that were fitted to long trainings do not apply.
    let prices = TablePrices::new(&cluster, 8, &Fitted::of_benchmarks()).expect("has tables");
    let mut errors: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for measured in &profile.measured {
        if measured.seconds < SHORTEST.0 {
            continue;
        }
        if let Some(price) = priced(&prices, measured) {
            let error = price.0 / measured.seconds - 1.0;
            errors.entry(&measured.kernel).or_default().push(error);
        }
    }
    println!("kernel, number, median error, 10th and 90th percentile");
    for (kernel, errors) in &mut errors {
        errors.sort_by(f64::total_cmp);
        let at = |share: f64| 100.0 * errors[((errors.len() - 1) as f64 * share) as usize];
        let [median, low, high] = [0.5, 0.1, 0.9].map(at);
        println!(
            "{kernel} {} {median:+.1}% {low:+.1}% {high:+.1}%",
            errors.len()
        );
        let limits = MEDIANS.iter().find(|(of, _)| of == kernel);
        if let Some((_, [lowest, highest])) = limits {
            assert!(
                (*lowest..=*highest).contains(&median),
                "{kernel}: {median:+.1}%"
            );
        }
    }
    for (kernel, _) in MEDIANS {
        assert!(errors.contains_key(kernel), "{kernel} was not measured");
    }
}
