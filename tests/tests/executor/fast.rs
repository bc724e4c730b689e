//! Fast mode: equal within rounding.

use catalog::Model;
use catalog::{Bytes, Precision};
use cpu_device::Numerics;

use super::exact::{ALONE, EXPERTS, MIXES, SCHEDULES};
use super::jobs::{job, llama, mixtral, nanogpt, train};

/// Losses of four steps differ from one device's by at most `tolerance` of them.
///
/// A sum of `n` terms in another order differs by about √n roundings of 6·10⁻⁸; the longest sums
/// here have 10³ terms and a loss depends on some 10² of them in a row, and AdamW divides by the root
/// of the second moment, which makes the first steps as sensitive as the sign of small gradients:
/// 10⁻⁴ leaves a margin of ten over what is seen.
fn check(model: &Model, tolerance: f64, layouts: &[&str]) {
    let losses =
        |layout: &str, numerics| train(&job(model, layout, numerics, Precision::Fp32, 4)).losses;
    let single = losses("tp=1,mbs=4", Numerics::Exact);
    for layout in layouts {
        for (a, b) in losses(layout, Numerics::Fast).iter().zip(&single) {
            assert!((a - b).abs() <= tolerance * b, "{layout}: {a} for {b}");
        }
    }
}

#[test]
fn layouts_agree_within_rounding() {
    let dense = [ALONE, SCHEDULES, MIXES].concat();
    check(&llama(), 1e-4, &dense);
    check(&nanogpt(0.1), 1e-4, &dense);
    // A token whose two best experts are close may change its choice.
    check(&mixtral(), 1e-3, EXPERTS);
}

/// Sums are added in member order, whatever the size of buckets, so buckets do not change bits.
#[test]
fn gradients_are_the_same_in_buckets_of_any_size() {
    let layouts = [
        "dp=2,zero=0,mbs=2",
        "dp=4,zero=1,mbs=1",
        "dp=2,zero=2,mbs=1",
        "dp=2,tp=2,zero=3,mbs=1",
        "dp_shard=2,dp_replicate=2,zero=2,mbs=2",
        "dp_replicate=2,zero=1,mbs=2",
        "pp=2,dp=2,zero=1,mbs=1,schedule=zb-h1",
        "pp=2,vpp=2,cp=2,mbs=2,schedule=interleaved",
    ];
    for (model, layouts) in [(nanogpt(0.1), layouts.as_slice()), (mixtral(), EXPERTS)] {
        for layout in layouts {
            let losses = |bucket, overlap: &str| {
                let layout = format!("{layout},overlap={overlap}");
                let mut job = job(&model, &layout, Numerics::Fast, Precision::Fp32, 3);
                job.settings.gradient_bucket = Bytes(bucket);
                train(&job).losses
            };
            let at_once = losses(u64::MAX, "none");
            for bucket in [1, 10_000, 100_000] {
                assert_eq!(losses(bucket, "grad"), at_once, "{layout}, {bucket} bytes");
            }
        }
    }
}
