//! Kernels on rows: nonlinearities, norms, rotary positions, dropout.

use catalog::model::NormKind;
use rayon::prelude::*;

use super::math::{self, row_sum};
use dtensor::layout::consecutive;
use dtensor::philox::Stream;

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

/// Elements per block of [`each_block`].
const BLOCK: usize = 4096;

/// Runs `block(index of the first element, elements)` on consecutive blocks of a flat buffer.
pub(super) fn each_block(
    out: &mut [f32],
    threads: usize,
    block: impl Fn(usize, &mut [f32]) + Sync,
) {
    each_row(out, BLOCK, threads, |index, chunk| {
        block(index * BLOCK, chunk)
    });
}

/// `out += x`.
pub(super) fn add(out: &mut [f32], x: &[f32], threads: usize) {
    each_block(out, threads, |first, out| math::add(out, &x[first..]));
}

/// Mean (0 for RMS norms) and reciprocal standard deviation of every row.
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

/// Rotary embedding: which columns of a head are rotated, and by which angles.
pub(super) struct Rotation {
    pub(super) head_dim: usize,
    /// First rotated column of a head.
    pub(super) first: usize,
    /// Whether pairs are `(2i, 2i + 1)` rather than `(i, i + dims/2)`.
    pub(super) neighbours: bool,
    /// Radians per token of every pair.
    pub(super) frequencies: Vec<f64>,
    pub(super) magnitude: f64,
    pub(super) backward: bool,
}

/// Rotates pairs of columns of every head by position and frequency.
pub(super) fn rope(
    x: &mut [f32],
    columns: usize,
    rotation: &Rotation,
    positions: &[u64],
    threads: usize,
) {
    let Rotation {
        head_dim,
        first,
        neighbours,
        ref frequencies,
        magnitude,
        backward,
    } = *rotation;
    let half = frequencies.len();
    let dims = 2 * half;
    let turns: Vec<(f32, f32)> = positions
        .iter()
        .flat_map(|&position| {
            frequencies.iter().map(move |&frequency| {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (sin, cos) = ((magnitude * sin) as f32, (magnitude * cos) as f32);
                (cos, if backward { -sin } else { sin })
            })
        })
        .collect();
    each_row(x, columns, threads, |row, values| {
        let at = row % positions.len();
        let turns = &turns[at * half..(at + 1) * half];
        for head in values.chunks_mut(head_dim) {
            let turning = &mut head[first..first + dims];
            if neighbours {
                for (pair, (cos, sin)) in turning.chunks_exact_mut(2).zip(turns) {
                    let (a, b) = (pair[0], pair[1]);
                    (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
                }
                continue;
            }
            let (low, high) = turning.split_at_mut(half);
            for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(turns) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    });
}

/// A dropout mask: 1 where the element is kept. `first(row)` is the global linear index of the
/// start of that row in the global tensor; `columns` are the global indices of the local columns.
pub(super) fn mask(
    rows: usize,
    columns: &[u64],
    first: impl Fn(usize) -> u64,
    probability: f64,
    stream: Stream,
) -> Vec<u8> {
    let mut mask = Vec::with_capacity(rows * columns.len());
    let mut uniforms = Vec::new();
    let runs = consecutive(columns);
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
