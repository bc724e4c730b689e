//! How fast a GPU computes matrix products whose rows are not aligned to 16 bytes.
//!
//! A matrix unit loads 16 bytes at a time (NVIDIA, "Matrix multiplication background user's guide", alignment). That works if
//! every row of a matrix starts at an address that is a multiple of 16. Rows of 50257 numbers in 16 bits, as the logits of
//! GPT-2, do not. Libraries then use kernels with smaller loads. The instructions that a multiprocessor (SM) can issue limit
//! these kernels, so their rate is assumed to grow with the number of SMs.
//!
//! Not priced: libraries older than CUDA 11 compute such products without matrix units (cuBLAS, "Tensor core usage").

use catalog::{Architecture, DType, Device, FlopRate};
use dtensor::Pass;

use crate::known;

/// Bytes that matrix units read at a time.
const PIECE: u64 = 16;

/// The row lengths of a product's three matrices. They decide the alignment, because each row starts where the one before
/// it ends. Two of the matrices have rows of the same length.
fn contiguous([m, n, k]: [u64; 3], pass: Pass) -> [u64; 2] {
    match pass {
        Pass::Forward | Pass::BackwardInput => [n, k],
        Pass::BackwardWeight => [m, n],
    }
}

/// The sizes of a 16-bit product after each row length is rounded up to a multiple of 16 bytes.
pub(crate) fn padded(sizes: [u64; 3], pass: Pass) -> [u64; 3] {
    let multiple = PIECE / DType::Bf16.size();
    let up = |size: u64| size.next_multiple_of(multiple);
    let [m, n, k] = sizes;
    match pass {
        Pass::Forward | Pass::BackwardInput => [m, up(n), up(k)],
        Pass::BackwardWeight => [up(m), up(n), k],
    }
}

/// How the rows of a 16-bit product's matrices are aligned in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// Every row starts at a multiple of 16 bytes.
    Aligned,
    /// Every row starts at a multiple of 4 bytes, but not every one at a multiple of 16.
    Even,
    /// Some matrix has rows of an odd length, so some of its rows start at odd multiples of 2 bytes.
    Odd,
}

impl Rows {
    /// The alignment of a product's rows.
    pub(super) fn of(sizes: [u64; 3], pass: Pass) -> Self {
        let odd = |size: &u64| size % 2 == 1;
        if padded(sizes, pass) == sizes {
            Self::Aligned
        } else if contiguous(sizes, pass).iter().any(odd) {
            Self::Odd
        } else {
            Self::Even
        }
    }

    /// The alignment of the rows of a kernel in a profile. Kernels other than 16-bit products count as aligned.
    pub(super) fn of_measured(kernel: &str, sizes: &[u64]) -> Self {
        let product = kernel.starts_with("matmul") && kernel.ends_with("bf16");
        let pass = match kernel.contains("weight gradient") {
            true => Pass::BackwardWeight,
            false => Pass::Forward,
        };
        match <[u64; 3]>::try_from(sizes) {
            Ok(sizes) if product => Self::of(sizes, pass),
            _ => Self::Aligned,
        }
    }
}

/// The highest rate of a device on a product with unaligned rows. `None` if the rows are aligned,
/// if the operands are not in 16 bits, or if the device is a CPU.
pub(super) fn rate(device: &Device, sizes: [u64; 3], dtype: DType, pass: Pass) -> Option<FlopRate> {
    let narrow = matches!(dtype, DType::Bf16 | DType::F16);
    if !narrow || device.architecture == Architecture::Cpu {
        return None;
    }
    let known = match (Rows::of(sizes, pass), pass) {
        (Rows::Aligned, _) => return None,
        (Rows::Even, _) => known::UNALIGNED,
        (Rows::Odd, Pass::Forward) => known::ODD_FORWARD,
        (Rows::Odd, Pass::BackwardInput | Pass::BackwardWeight) => known::ODD_BACKWARD,
    };
    Some(FlopRate(
        known.of_multiprocessor().0 * device.sm_count as f64,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_where_rows_begin() {
        use Pass::{BackwardInput, BackwardWeight, Forward};
        let device = catalog::load::device("h200").expect("is a preset");
        let rate = |sizes, pass| rate(&device, sizes, DType::Bf16, pass).map(|rate| rate.0);
        let (tokens, hidden) = (8191, 768);
        for (vocabulary, aligned) in [
            (50_304, true),
            (50_264, true),
            (50_260, false),
            (50_257, false),
        ] {
            let products = [
                ([tokens, vocabulary, hidden], Forward),
                ([tokens, hidden, vocabulary], BackwardInput),
                ([vocabulary, hidden, tokens], BackwardWeight),
            ];
            for (sizes, pass) in products {
                assert_eq!(rate(sizes, pass).is_none(), aligned, "{sizes:?}");
                assert_eq!(Rows::of(padded(sizes, pass), pass), Rows::Aligned);
            }
        }
        let odd = rate([8192, 50_257, 768], Forward).expect("has one");
        let even = rate([8192, 50_258, 768], Forward).expect("has one");
        assert!(odd < even && even < 0.4 * 989e12, "{odd} {even}");
    }
}
