//! The rate of products whose rows begin at no multiple of 16 bytes, as with GPT-2's vocabulary of 50257.
//!
//! Matrix units are fed in pieces of 16 bytes (NVIDIA, "Matrix multiplication background user's guide", alignment).
//! Libraries run other products with kernels that load smaller pieces; these are bound by the instructions that a
//! multiprocessor (SM) issues, so their rate is taken to grow with the number of SMs. Before CUDA 11 matrix units took no
//! such products at all (cuBLAS, "Tensor core usage"), which is not priced.

use catalog::{Architecture, DType, Device, FlopRate};

use crate::known::{self, Known};

/// Which of the three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmLayout {
    /// The output, `x · wᵀ`.
    Forward,
    /// The gradient of the input, `g · w`.
    DataGrad,
    /// The gradient of the weight, `gᵀ · x`.
    WeightGrad,
}

/// Bytes that matrix units read at a time.
const PIECE: u64 = 16;

/// The sizes along which the three matrices of a product lie in memory: those that decide where their rows begin.
fn contiguous([m, n, k]: [u64; 3], layout: GemmLayout) -> [u64; 2] {
    match layout {
        GemmLayout::Forward | GemmLayout::DataGrad => [n, k],
        GemmLayout::WeightGrad => [m, n],
    }
}

/// The sizes of a product in 16 bits after its rows are padded to whole pieces.
pub(crate) fn padded(sizes: [u64; 3], layout: GemmLayout) -> [u64; 3] {
    let multiple = PIECE / DType::Bf16.size();
    let up = |size: u64| size.next_multiple_of(multiple);
    let [m, n, k] = sizes;
    match layout {
        GemmLayout::Forward | GemmLayout::DataGrad => [m, up(n), up(k)],
        GemmLayout::WeightGrad => [up(m), up(n), k],
    }
}

/// Whether a product in 16 bits can be read in whole pieces.
pub(super) fn is_aligned(sizes: [u64; 3], layout: GemmLayout) -> bool {
    padded(sizes, layout) == sizes
}

/// Whether a measured kernel is a product whose rows are not aligned: such products say nothing of others, nor others of
/// them.
pub(super) fn is_unaligned_product(kernel: &str, sizes: &[u64]) -> bool {
    let Ok(sizes) = <[u64; 3]>::try_from(sizes) else {
        return false;
    };
    let layout = match kernel.contains("weight gradient") {
        true => GemmLayout::WeightGrad,
        false => GemmLayout::Forward,
    };
    kernel.starts_with("matmul") && kernel.ends_with("bf16") && !is_aligned(sizes, layout)
}

/// The most that a device reaches on a product whose rows are not aligned; `None` if its rows are, or if its type has
/// no such kernels.
pub(super) fn rate(
    device: &Device,
    sizes: [u64; 3],
    dtype: DType,
    layout: GemmLayout,
) -> Option<FlopRate> {
    let narrow = matches!(dtype, DType::Bf16 | DType::F16);
    if !narrow || device.architecture == Architecture::Cpu || is_aligned(sizes, layout) {
        return None;
    }
    let whole = |known: Known| FlopRate(known.of_multiprocessor().0 * device.sm_count as f64);
    let odd = contiguous(sizes, layout).iter().any(|size| size % 2 == 1);
    Some(whole(match (odd, layout) {
        (true, GemmLayout::Forward) => known::ODD_FORWARD,
        (true, GemmLayout::DataGrad | GemmLayout::WeightGrad) => known::ODD_BACKWARD,
        (false, _) => known::UNALIGNED,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_where_rows_begin() {
        use GemmLayout::{DataGrad, Forward, WeightGrad};
        let device = catalog::load::device("h200").expect("is a preset");
        let rate = |sizes, layout| rate(&device, sizes, DType::Bf16, layout).map(|rate| rate.0);
        let (tokens, hidden) = (8191, 768);
        for (vocabulary, aligned) in [
            (50_304, true),
            (50_264, true),
            (50_260, false),
            (50_257, false),
        ] {
            let products = [
                ([tokens, vocabulary, hidden], Forward),
                ([tokens, hidden, vocabulary], DataGrad),
                ([vocabulary, hidden, tokens], WeightGrad),
            ];
            for (sizes, layout) in products {
                assert_eq!(rate(sizes, layout).is_none(), aligned, "{sizes:?}");
                assert!(is_aligned(padded(sizes, layout), layout));
            }
        }
        let odd = rate([8192, 50_257, 768], Forward).expect("has one");
        let even = rate([8192, 50_258, 768], Forward).expect("has one");
        assert!(odd < even && even < 0.4 * 989e12, "{odd} {even}");
    }
}
