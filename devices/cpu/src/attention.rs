//! Core attention in pieces: scores, softmax, context, and their transposes.

use std::borrow::Cow;
use std::ops::Range;

use catalog::Window;

use super::elementwise::{each_block, each_row};
use super::gemm::{Matrix, multiply_add, multiply_part};
use super::math::{exp, row_sum, tanh};
use super::tree::TreeSum;

/// Query rows computed together: keys that the causal mask hides from all of them are skipped.
const BLOCK: usize = 64;

/// Sizes of one attention call. Keys are in global order; queries are at the global positions in `positions`.
pub(super) struct Heads<'p> {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) kv_len: usize,
    /// Global position of every local query.
    pub(super) positions: &'p [u64],
    pub(super) window: Option<Window>,
    pub(super) exact: bool,
    pub(super) threads: usize,
}

/// How scores become attention weights.
pub(super) struct Weighting {
    /// Factor that scores are multiplied by before the softmax.
    pub(super) scale: f32,
    /// Soft cap of the scaled scores, if the model has one.
    pub(super) cap: Option<f32>,
    /// ALiBi slopes by local head: what a key's score loses per token of distance from the query.
    pub(super) slopes: Option<Vec<f32>>,
    /// Sink logits by local head: each takes part in the softmax but contributes no value.
    pub(super) sinks: Option<Vec<f32>>,
}

impl Weighting {
    /// Scores of a row, multiplied by the scale, then soft-capped and with ALiBi bias. `None` if the model has no cap, no ALiBi and
    /// no sinks: then the caller applies the scale itself.
    fn changed(
        &self,
        scores: &[f32],
        head: usize,
        keys: Range<usize>,
        position: u64,
    ) -> Option<Vec<f32>> {
        if self.cap.is_none() && self.slopes.is_none() && self.sinks.is_none() {
            return None;
        }
        let mut changed: Vec<f32> = scores.iter().map(|x| x * self.scale).collect();
        if let Some(cap) = self.cap {
            for x in &mut changed {
                *x = cap * tanh(*x / cap);
            }
        }
        if let Some(slopes) = &self.slopes {
            for (x, key) in changed.iter_mut().zip(keys) {
                *x -= slopes[head] * (position - key as u64) as f32;
            }
        }
        Some(changed)
    }
}

impl Heads<'_> {
    /// Local head that a row of scores belongs to.
    fn head_of(&self, row: usize) -> usize {
        row / self.queries() % self.heads
    }

    fn queries(&self) -> usize {
        self.positions.len()
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Range of keys that the query at this position attends to.
    fn seen(&self, position: u64) -> Range<usize> {
        let end = (position as usize + 1).min(self.kv_len);
        let start = self.window.map_or(0, |w| w.first(position) as usize);
        start.min(end)..end
    }

    /// Blocks of these query rows, each with the end of the keys that any of its queries attends to.
    fn blocks(&self, rows: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + '_ {
        let end = rows.end;
        rows.step_by(BLOCK).map(move |start| {
            let rows = start..(start + BLOCK).min(end);
            let last = self.positions[rows.clone()].iter().max().copied();
            (rows, last.map_or(0, |p| self.seen(p).end))
        })
    }

    /// Rows `range` of one head of a tensor `[b, s, heads·dim]`.
    fn head<'a>(
        &self,
        x: &'a [f32],
        sequence: usize,
        (heads, dim): (usize, usize),
        (b, h): (usize, usize),
        range: Range<usize>,
    ) -> Matrix<'a> {
        let width = heads * dim;
        let start = (b * sequence + range.start) * width + h * dim;
        Matrix::new(&x[start..], range.len(), dim, width)
    }

    /// `out[b, h, q, k] = Σ_d x[b, q, h, d] · y[b, k, h/group, d]`: scores from queries and keys,
    /// or the gradient of the weights from the output's gradient and the values.
    pub(super) fn rows_by_keys(&self, x: &[f32], y: &[f32], dim: usize) -> Vec<f32> {
        let (queries, keys) = (self.queries(), self.kv_len);
        let mut out = vec![0.0; self.batch * self.heads * queries * keys];
        let one = |index: usize, out: &mut [f32]| {
            let (b, h) = (index / self.heads, index % self.heads);
            for (rows, end) in self.blocks(0..queries) {
                let a = self.head(x, queries, (self.heads, dim), (b, h), rows.clone());
                let kv = (b, h / self.group());
                let c = self.head(y, keys, (self.kv_heads, dim), kv, 0..end);
                let out = &mut out[rows.start * keys..rows.end * keys];
                self.product(a, c.transposed(), out, keys);
            }
        };
        each_row(&mut out, queries * keys, self.threads, one);
        out
    }

    /// `out[b, q, h, d] = Σ_k w[b, h, q, k] · y[b, k, h/group, d]`: the context from weights and
    /// values, or the gradient of the queries from the scores' gradient and the keys.
    pub(super) fn weighted_keys(&self, w: &[f32], y: &[f32], dim: usize) -> Vec<f32> {
        let (queries, keys) = (self.queries(), self.kv_len);
        let width = self.heads * dim;
        let mut out = vec![0.0; self.batch * queries * width];
        let one = |b: usize, out: &mut [f32]| {
            for h in 0..self.heads {
                let weights = &w[(b * self.heads + h) * queries * keys..];
                for (rows, end) in self.blocks(0..queries) {
                    let a = Matrix::new(&weights[rows.start * keys..], rows.len(), end, keys);
                    let kv = (b, h / self.group());
                    let c = self.head(y, keys, (self.kv_heads, dim), kv, 0..end);
                    let out = &mut out[rows.start * width + h * dim..];
                    self.product(a, c, out, width);
                }
            }
        };
        each_row(&mut out, queries * width, self.threads, one);
        out
    }

    /// `out[b, k, g, d] = Σ_{h in group g} Σ_q w[b, h, q, k] · x[b, q, h, d]`: gradients of values
    /// and keys.
    pub(super) fn weighted_rows(&self, w: &[f32], x: &[f32], dim: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.batch * self.kv_len * self.kv_heads * dim];
        self.add_weighted_rows(w, x, dim, 0..self.queries(), &mut out);
        out
    }

    /// [`Self::weighted_rows`], summed over the canonical tree, whose leaves are query positions.
    pub(super) fn weighted_rows_tree(
        &self,
        w: &[f32],
        x: &[f32],
        dim: usize,
        leaves: &[(u64, Range<usize>)],
    ) -> TreeSum {
        let numbers = self.batch * self.kv_len * self.kv_heads * dim;
        TreeSum::of(leaves, numbers, |range, out| {
            self.add_weighted_rows(w, x, dim, range, out);
        })
    }

    fn add_weighted_rows(
        &self,
        w: &[f32],
        x: &[f32],
        dim: usize,
        range: Range<usize>,
        out: &mut [f32],
    ) {
        let (queries, keys) = (self.queries(), self.kv_len);
        let width = self.kv_heads * dim;
        let one = |b: usize, out: &mut [f32]| {
            for h in 0..self.heads {
                let weights = &w[(b * self.heads + h) * queries * keys..];
                let out = &mut out[h / self.group() * dim..];
                for (rows, end) in self.blocks(range.clone()) {
                    let a = Matrix::new(&weights[rows.start * keys..], rows.len(), end, keys);
                    let c = self.head(x, queries, (self.heads, dim), (b, h), rows);
                    self.product(a.transposed(), c, out, width);
                }
            }
        };
        each_row(out, keys * width, self.threads, one);
    }

    fn product(&self, a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32], stride: usize) {
        if self.exact {
            multiply_part(a, b, 0..a.columns, out, stride);
        } else {
            multiply_add(a, b, out, stride, 1);
        }
    }

    /// Softmax of the scaled, masked scores, with soft cap, ALiBi biases and sinks where the model has them.
    pub(super) fn softmax(&self, scores: &[f32], weighting: &Weighting) -> Vec<f32> {
        let keys = self.kv_len;
        let mut out = vec![0.0; scores.len()];
        each_row(&mut out, keys, self.threads, |row, out| {
            let position = self.positions[row % self.queries()];
            let seen = self.seen(position);
            let scores = &scores[row * keys..(row + 1) * keys][seen.clone()];
            let out = &mut out[seen.clone()];
            let head = self.head_of(row);
            let (scores, scale) = match weighting.changed(scores, head, seen, position) {
                Some(changed) => (Cow::Owned(changed), 1.0),
                None => (Cow::Borrowed(scores), weighting.scale),
            };
            let sink = weighting.sinks.as_ref().map(|sinks| sinks[head]);
            let least = sink.unwrap_or(f32::NEG_INFINITY);
            let largest = scores.iter().copied().fold(least, f32::max);
            for (y, &x) in out.iter_mut().zip(scores.iter()) {
                *y = exp((x - largest) * scale);
            }
            let sink = sink.map_or(0.0, |sink| exp(sink - largest));
            let inverse = 1.0 / (row_sum(out.iter().copied()) + sink);
            for y in out {
                *y *= inverse;
            }
        });
        out
    }

    /// Gradient of the scores: `scale · p · (dp − Σ p·dp)`.
    pub(super) fn softmax_backward(&self, p: &[f32], dp: &[f32], scale: f32) -> Vec<f32> {
        let keys = self.kv_len;
        let mut out = vec![0.0; p.len()];
        each_row(&mut out, keys, self.threads, |row, out| {
            let seen = self.seen(self.positions[row % self.queries()]);
            let range = row * keys..(row + 1) * keys;
            let (p, dp) = (&p[range.clone()][seen.clone()], &dp[range][seen.clone()]);
            let along = row_sum(p.iter().zip(dp).map(|(p, d)| p * d));
            for ((y, p), d) in out[seen].iter_mut().zip(p).zip(dp) {
                *y = scale * p * (d - along);
            }
        });
        out
    }

    /// Gradient of every head's sink by query, `[batch · queries, heads]`: −(weight of the sink in
    /// the softmax) · Σ p·dp.
    pub(super) fn sinks_backward(&self, p: &[f32], dp: &[f32]) -> Vec<f32> {
        let (keys, queries) = (self.kv_len, self.queries());
        let mut out = vec![0.0; self.batch * queries * self.heads];
        each_row(&mut out, self.heads, self.threads, |row, out| {
            let (b, q) = (row / queries, row % queries);
            for (h, y) in out.iter_mut().enumerate() {
                let start = ((b * self.heads + h) * queries + q) * keys;
                let seen = self.seen(self.positions[q]);
                let (p, dp) = (&p[start..][seen.clone()], &dp[start..][seen]);
                let taken = 1.0 - row_sum(p.iter().copied());
                *y = -taken * row_sum(p.iter().zip(dp).map(|(p, d)| p * d));
            }
        });
        out
    }

    /// Multiplies the gradient of scaled, soft-capped scores by the derivative of the cap.
    pub(super) fn uncap(&self, gradient: &mut [f32], scores: &[f32], (scale, cap): (f32, f32)) {
        each_block(gradient, self.threads, |first, gradient| {
            for (d, x) in gradient.iter_mut().zip(&scores[first..]) {
                let t = tanh(x * scale / cap);
                *d *= 1.0 - t * t;
            }
        });
    }
}
