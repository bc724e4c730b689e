//! Kernels over tokens: embedding lookup, the loss, and sums over tokens for gradients of weights.

use std::ops::Range;

use super::elementwise::each_row;
use super::math::{add, exp, row_sum};
use super::tree::TreeSum;

/// Looks up rows of `table` by token id. Ids of other ranks' shards give −0, which leaves whatever it is added to
/// unchanged, sign included.
pub(super) fn lookup(ids: &[u32], table: &[f32], columns: usize, first: u64) -> Vec<f32> {
    let rows = (table.len() / columns) as u64;
    let mut out = vec![-0.0; ids.len() * columns];
    for (out, &id) in out.chunks_mut(columns).zip(ids) {
        if let Some(row) = u64::from(id).checked_sub(first).filter(|&row| row < rows) {
            let at = row as usize * columns;
            out.copy_from_slice(&table[at..at + columns]);
        }
    }
    out
}

/// Adds rows of `gradient` to the rows of a table their tokens looked up.
pub(super) fn scatter(
    ids: &[u32],
    gradient: &[f32],
    columns: usize,
    first: u64,
    rows: Range<usize>,
    table: &mut [f32],
) {
    let count = (table.len() / columns) as u64;
    for row in rows {
        let id = u64::from(ids[row]);
        if let Some(at) = id.checked_sub(first).filter(|&at| at < count) {
            let to = &mut table[at as usize * columns..][..columns];
            add(to, &gradient[row * columns..][..columns]);
        }
    }
}

/// Adds Σ over `rows` of `value(row, column)` to the first `columns` elements of `out`.
pub(super) fn column_sum(
    rows: impl Iterator<Item = usize>,
    out: &mut [f32],
    value: impl Fn(usize, usize) -> f32,
) {
    for row in rows {
        for (j, sum) in out.iter_mut().enumerate() {
            *sum += value(row, j);
        }
    }
}

/// What the loss needs of every row of logits: the largest, the sum of exponentials relative to it,
/// and the label's logit.
pub(super) struct RowSums {
    pub(super) largest: Vec<f32>,
    pub(super) sum: Vec<f32>,
    pub(super) target: Vec<f32>,
}

/// The largest logit of every row.
pub(super) fn largest(logits: &[f32], columns: usize, rows: usize) -> Vec<f32> {
    (0..rows)
        .map(|row| &logits[row * columns..(row + 1) * columns])
        .map(|row| row.iter().copied().fold(f32::NEG_INFINITY, f32::max))
        .collect()
}

/// Sums of exponentials of every row, relative to its largest.
pub(super) fn sums(logits: &[f32], columns: usize, largest: &[f32], threads: usize) -> Vec<f32> {
    let mut out = vec![0.0; largest.len()];
    each_row(&mut out, 16, threads, |block, chunk| {
        for (row, sum) in (block * 16..).zip(chunk) {
            let values = &logits[row * columns..(row + 1) * columns];
            *sum = row_sum(values.iter().map(|x| exp(x - largest[row])));
        }
    });
    out
}

/// The same sums as a tree over leaves of the vocabulary.
pub(super) fn sums_tree(
    logits: &[f32],
    columns: usize,
    largest: &[f32],
    leaves: &[(u64, Range<usize>)],
) -> TreeSum {
    TreeSum::of(leaves, largest.len(), |range, sums| {
        let rows = logits.chunks(columns).zip(largest);
        for (sum, (row, largest)) in sums.iter_mut().zip(rows) {
            *sum = (row[range.clone()].iter()).fold(0.0, |sum, x| sum + exp(x - largest));
        }
    })
}

/// Logits of the labels; −0 where the label is on another rank.
pub(super) fn targets(logits: &[f32], columns: usize, labels: &[u32], first: u64) -> Vec<f32> {
    labels
        .iter()
        .enumerate()
        .map(|(row, &label)| {
            u64::from(label)
                .checked_sub(first)
                .filter(|&at| at < columns as u64)
                .map_or(-0.0, |at| logits[row * columns + at as usize])
        })
        .collect()
}

/// Returns the loss of every row; overwrites the logits by their gradients times `scale`.
pub(super) fn cross_entropy(
    logits: &mut [f32],
    columns: usize,
    rows: &RowSums,
    labels: &[u32],
    first: u64,
    scale: f32,
    threads: usize,
) -> Vec<f32> {
    each_row(logits, columns, threads, |row, values| {
        let (largest, inverse) = (rows.largest[row], 1.0 / rows.sum[row]);
        for x in values.iter_mut() {
            *x = exp(*x - largest) * inverse * scale;
        }
        if let Some(x) = u64::from(labels[row])
            .checked_sub(first)
            .and_then(|at| values.get_mut(at as usize))
        {
            *x -= scale;
        }
    });
    (0..labels.len())
        .map(|row| rows.largest[row] + rows.sum[row].ln() - rows.target[row])
        .collect()
}
