//! Kernels on rows: nonlinearities, norms, rotary positions, dropout.

use rayon::prelude::*;
use spec::model::{Activation, NormKind};

use super::math::{exp, row_sum, sigmoid, tanh};
use crate::philox::Stream;

/// Elements above which a kernel is worth sharing out over threads.
const PARALLEL: usize = 1 << 15;

/// Runs `row` on every row of `out`, on several threads when there is enough to do.
pub(super) fn each_row(
    out: &mut [f32],
    columns: usize,
    threads: usize,
    row: impl Fn(usize, &mut [f32]) + Sync,
) {
    if columns == 0 {
        return;
    }
    if threads > 1 && out.len() > PARALLEL {
        out.par_chunks_mut(columns)
            .enumerate()
            .for_each(|(i, chunk)| row(i, chunk));
    } else {
        out.chunks_mut(columns)
            .enumerate()
            .for_each(|(i, chunk)| row(i, chunk));
    }
}

/// Runs `at` for every element, in blocks.
pub(super) fn each(out: &mut [f32], threads: usize, at: impl Fn(usize, &mut f32) + Sync) {
    const BLOCK: usize = 4096;
    each_row(out, BLOCK, threads, |block, chunk| {
        for (i, x) in (block * BLOCK..).zip(chunk) {
            at(i, x);
        }
    });
}

/// A nonlinearity and its derivative.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) function: Activation,
    pub(super) tanh: bool,
}

/// √(2/π) of the tanh approximation of the GELU.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

impl Function {
    #[inline]
    pub(super) fn value(self, x: f32) -> f32 {
        match self.function {
            Activation::Gelu if self.tanh => {
                0.5 * x * (1.0 + tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x)))
            }
            Activation::Gelu => 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
            Activation::Silu => x * sigmoid(x),
            Activation::Relu => x.max(0.0),
            Activation::Relu2 => x.max(0.0) * x.max(0.0),
        }
    }

    #[inline]
    pub(super) fn derivative(self, x: f32) -> f32 {
        match self.function {
            Activation::Gelu if self.tanh => {
                let t = tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x));
                let inner = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
            }
            Activation::Gelu => {
                let cumulative = 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2));
                // The density of the standard normal: 1/√(2π).
                cumulative + x * 0.398_942_3 * exp(-0.5 * x * x)
            }
            Activation::Silu => {
                let s = sigmoid(x);
                s * (1.0 + x * (1.0 - s))
            }
            Activation::Relu => f32::from(x > 0.0),
            Activation::Relu2 => 2.0 * x.max(0.0),
        }
    }
}

/// Mean (0 for RMS norms) and reciprocal deviation of every row.
pub(super) fn statistics(x: &[f32], columns: usize, kind: NormKind, epsilon: f64) -> Vec<[f32; 2]> {
    let n = columns as f32;
    x.chunks(columns)
        .map(|row| {
            let mean = match kind {
                NormKind::LayerNorm => row_sum(row.iter().copied()) / n,
                NormKind::RmsNorm => 0.0,
            };
            let square = |&x: &f32| (x - mean) * (x - mean);
            let variance = row_sum(row.iter().map(square)) / n;
            [mean, 1.0 / (variance + epsilon as f32).sqrt()]
        })
        .collect()
}

/// `(x − mean) · r · weight + bias`.
pub(super) fn norm(
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    statistics: &[[f32; 2]],
    threads: usize,
) -> Vec<f32> {
    let columns = weight.len();
    let mut out = vec![0.0; x.len()];
    each_row(&mut out, columns, threads, |i, row| {
        let [mean, r] = statistics[i];
        let x = &x[i * columns..(i + 1) * columns];
        for (j, y) in row.iter_mut().enumerate() {
            let normed = (x[j] - mean) * r * weight[j];
            *y = bias.map_or(normed, |b| normed + b[j]);
        }
    });
    out
}

/// Gradient of a norm's input: `r · (g − mean(g) − x̂ · mean(g · x̂))` with `g = dy · weight`; the
/// mean of `g` only for LayerNorm.
pub(super) fn norm_backward(
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    statistics: &[[f32; 2]],
    kind: NormKind,
    threads: usize,
) -> Vec<f32> {
    let columns = weight.len();
    let n = columns as f32;
    let mut out = vec![0.0; x.len()];
    each_row(&mut out, columns, threads, |i, row| {
        let [mean, r] = statistics[i];
        let range = i * columns..(i + 1) * columns;
        let (x, dy) = (&x[range.clone()], &dy[range]);
        let g = |j: usize| dy[j] * weight[j];
        let hat = |j: usize| (x[j] - mean) * r;
        let along = row_sum((0..columns).map(|j| g(j) * hat(j))) / n;
        let average = match kind {
            NormKind::LayerNorm => row_sum((0..columns).map(g)) / n,
            NormKind::RmsNorm => 0.0,
        };
        for (j, d) in row.iter_mut().enumerate() {
            *d = r * (g(j) - average - hat(j) * along);
        }
    });
    out
}

/// Rotates pairs `(i, i + dims/2)` of the first `dims` of every `head_dim` columns by
/// `position · theta^(−2i/dims)`; backwards when `backward`.
pub(super) fn rope(
    x: &mut [f32],
    columns: usize,
    [head_dim, dims]: [usize; 2],
    theta: f64,
    positions: &[u64],
    backward: bool,
    threads: usize,
) {
    let half = dims / 2;
    let turns: Vec<(f32, f32)> = positions
        .iter()
        .flat_map(|&position| {
            (0..half).map(move |i| {
                let frequency = theta.powf(-2.0 * i as f64 / dims as f64);
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                (cos as f32, if backward { -sin as f32 } else { sin as f32 })
            })
        })
        .collect();
    each_row(x, columns, threads, |row, values| {
        let at = row % positions.len();
        let turns = &turns[at * half..(at + 1) * half];
        for head in values.chunks_mut(head_dim) {
            let (low, high) = head[..dims].split_at_mut(half);
            for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(turns) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    });
}

/// A dropout mask: 1 where the element is kept. `first` gives the global linear index of a row's
/// first element; `columns` are contiguous in the global tensor when `contiguous` is `None`,
/// otherwise it gives every column's offset.
pub(super) fn mask(
    rows: usize,
    columns: &[u64],
    first: impl Fn(usize) -> u64,
    probability: f64,
    stream: Stream,
) -> Vec<u8> {
    let mut mask = Vec::with_capacity(rows * columns.len());
    let mut uniforms = Vec::new();
    let runs = runs(columns);
    for row in 0..rows {
        for run in &runs {
            uniforms.resize(run.len(), 0.0);
            stream.uniforms(first(row) + columns[run.start], &mut uniforms);
            mask.extend(
                uniforms
                    .iter()
                    .map(|&u| u8::from(f64::from(u) >= probability)),
            );
        }
    }
    mask
}

/// Ranges of consecutive numbers.
fn runs(indices: &[u64]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, &index) in indices.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if indices[run.end - 1] + 1 == index => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}
