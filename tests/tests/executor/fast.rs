//! Fast mode: equal within rounding.

use dtensor::cpu::Numerics;
use spec::Precision;
use spec::model::ModelConfig;

use super::exact::{ALONE, EXPERTS, MIXES, SCHEDULES};
use super::jobs::{job, llama, mixtral, nanogpt, train};

/// Losses of four steps differ from one device's by at most `tolerance` of them.
///
/// A sum of `n` terms in another order differs by about √n roundings of 6·10⁻⁸; the longest sums
/// here have 10³ terms and a loss depends on some 10² of them in a row, and AdamW divides by the root
/// of the second moment, which makes the first steps as sensitive as the sign of small gradients:
/// 10⁻⁴ leaves a margin of ten over what is seen.
fn check(model: &ModelConfig, tolerance: f64, layouts: &[&str]) {
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
