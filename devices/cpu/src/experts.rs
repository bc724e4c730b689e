//! Routing of tokens to experts, and the exchange of their rows between ranks.

use super::math::{add, exp, sigmoid};
use super::tensor::Tensor;
use catalog::DType;
use catalog::model::Router;
use comm::{CommError, Communicator, Group, Message};
use dtensor::placement::BlockMesh;
use dtensor::plan::RoutedRows;
use std::borrow::Cow;
use std::sync::Arc;

/// One row that is dispatched: a token's choice of an expert. Rows are sorted by these fields, so an expert sees its
/// tokens in global order whichever rank sent them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// Global index of the expert.
    pub expert: u32,
    /// Global index of the token in the batch.
    pub token: u64,
    /// Which of the token's top-k choices, best first.
    pub slot: u32,
}

/// Bytes of a row's header (expert, slot, token) in a message.
const ROW_BYTES: usize = 16;

/// The rows on this rank after one exchange of the dispatch.
#[derive(Clone, Debug)]
pub struct Level {
    /// The rows, sorted.
    pub rows: Vec<Row>,
    /// For every row, the peer that it came from and its index among the rows of that peer; empty at the first level,
    /// before any exchange.
    origin: Vec<(u32, u32)>,
    /// For every peer, the indices of the previous level's rows that are sent to it (the same rows may go to all).
    sent: Vec<Vec<u32>>,
    /// Number of rows received from each peer.
    received: Vec<usize>,
}

/// A router's choices for the tokens of one micro-batch, and how their rows were exchanged.
#[derive(Clone, Debug)]
pub struct Route {
    /// Experts per token.
    pub top_k: usize,
    /// Number of experts of the layer, over all ranks.
    pub experts: usize,
    /// Chosen experts of every local token, best first.
    pub chosen: Vec<u32>,
    /// For every row of the first level, the choice it stands for: `token · k + slot` with the local token.
    pub source: Vec<u32>,
    /// Rows before any exchange, then after each exchange on the way to the ranks of their experts.
    pub levels: Vec<Level>,
}

impl Route {
    /// Bytes of the kept indices as the trace counts them: 64 bits per token and choice.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        8 * self.chosen.len() as u64
    }

    /// Chooses the `top_k` experts of the largest `ranking` for every token (ties: the lower
    /// expert), and sorts the rows by expert and token.
    pub(super) fn new(ranking: &[f32], experts: usize, top_k: usize, tokens: &[u64]) -> Self {
        let mut chosen = Vec::with_capacity(tokens.len() * top_k);
        for row in ranking.chunks(experts) {
            let mut order: Vec<u32> = (0..experts as u32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            chosen.extend(&order[..top_k]);
        }
        let mut rows: Vec<(Row, u32)> = chosen
            .iter()
            .enumerate()
            .map(|(source, &expert)| {
                let row = Row {
                    expert,
                    token: tokens[source / top_k],
                    slot: (source % top_k) as u32,
                };
                (row, source as u32)
            })
            .collect();
        rows.sort_unstable();
        let first = Level {
            rows: rows.iter().map(|r| r.0).collect(),
            origin: Vec::new(),
            sent: Vec::new(),
            received: Vec::new(),
        };
        Self {
            top_k,
            experts,
            chosen,
            source: rows.iter().map(|r| r.1).collect(),
            levels: vec![first],
        }
    }

    /// For every choice (`token · k + slot`), the index of its row at the first level.
    pub(super) fn places(&self) -> Vec<usize> {
        let mut places = vec![0; self.source.len()];
        for (row, &source) in self.source.iter().enumerate() {
            places[source as usize] = row;
        }
        places
    }

    /// How many rows reached this rank's experts.
    pub(super) fn rows(&self, mesh: &BlockMesh) -> RoutedRows {
        let count = |level: usize| self.levels[level].rows.len() as u64;
        RoutedRows {
            dispatched: count(usize::from(mesh.ep > 1)),
            gathered: count(self.levels.len() - 1),
        }
    }

    /// Rows at the last level, on the ranks of their experts.
    pub(super) fn at_experts(&self) -> &[Row] {
        &self.levels[self.levels.len() - 1].rows
    }

    /// Ranges of the last level's rows that belong to each of the experts `first..first + count`.
    pub(super) fn groups(&self, first: usize, count: usize) -> Vec<std::ops::Range<usize>> {
        let rows = self.at_experts();
        let start = |expert: usize| rows.partition_point(|r| (r.expert as usize) < expert);
        (first..first + count)
            .map(|e| start(e)..start(e + 1))
            .collect()
    }

    /// Adds the level where every row is on the rank of its expert, or, with `everyone`, on all
    /// ranks of the group.
    pub(super) fn extend(
        &mut self,
        comm: &dyn Communicator,
        group: &Group,
        what: &str,
        everyone: bool,
    ) -> Result<(), CommError> {
        let rows = &self.levels[self.levels.len() - 1].rows;
        let per_rank = self.experts.div_ceil(group.size());
        let sent: Vec<Vec<u32>> = (0..group.size())
            .map(|peer| {
                (0..rows.len() as u32)
                    .filter(|&i| everyone || rows[i as usize].expert as usize / per_rank == peer)
                    .collect()
            })
            .collect();
        let describe = |indices: &Vec<u32>| {
            let mut bytes = Vec::with_capacity(indices.len() * ROW_BYTES);
            for &i in indices {
                let row = rows[i as usize];
                bytes.extend(row.expert.to_le_bytes());
                bytes.extend(row.slot.to_le_bytes());
                bytes.extend(row.token.to_le_bytes());
            }
            Arc::new(bytes)
        };
        let parts = sent.iter().map(describe).collect();
        let arrived = group.all_to_all(comm, what, parts)?.wait(comm)?;
        let mut met: Vec<(Row, (u32, u32))> = Vec::new();
        let mut received = Vec::with_capacity(arrived.len());
        for (peer, bytes) in arrived.iter().enumerate() {
            received.push(bytes.len() / ROW_BYTES);
            for (place, bytes) in bytes.chunks_exact(ROW_BYTES).enumerate() {
                let row = Row {
                    expert: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
                    slot: u32::from_le_bytes(bytes[4..8].try_into().expect("four bytes")),
                    token: u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes")),
                };
                met.push((row, (peer as u32, place as u32)));
            }
        }
        met.sort_unstable();
        self.levels.push(Level {
            rows: met.iter().map(|m| m.0).collect(),
            origin: met.iter().map(|m| m.1).collect(),
            sent,
            received,
        });
        Ok(())
    }
}

impl Level {
    /// Sends the data of the previous level's rows to this level.
    pub(super) fn forward(
        &self,
        comm: &dyn Communicator,
        group: &Group,
        what: &str,
        data: &Tensor,
    ) -> Result<Tensor, CommError> {
        let columns = data.columns();
        let dtype = data.dtype();
        let values = data.f32();
        let pick = |indices: &Vec<u32>| {
            let rows = indices
                .iter()
                .flat_map(|&i| values[i as usize * columns..][..columns].iter().copied());
            Tensor::message(rows.collect(), dtype)
        };
        let parts = self.sent.iter().map(pick).collect();
        let arrived = group.all_to_all(comm, what, parts)?.wait(comm)?;
        let arrived = unpack(&arrived, dtype);
        let mut out = Vec::with_capacity(self.rows.len() * columns);
        for &(peer, place) in &self.origin {
            out.extend_from_slice(&arrived[peer as usize][place as usize * columns..][..columns]);
        }
        Ok(Tensor::new(vec![self.rows.len(), columns], out, dtype))
    }

    /// Rows of this level grouped by the peer they came from, in the order in which that peer sent them.
    pub(super) fn parts(&self, values: &[f32], columns: usize) -> Vec<Vec<f32>> {
        let mut parts: Vec<Vec<f32>> = self
            .received
            .iter()
            .map(|&rows| vec![0.0; rows * columns])
            .collect();
        for (row, &(peer, place)) in self.origin.iter().enumerate() {
            parts[peer as usize][place as usize * columns..][..columns]
                .copy_from_slice(&values[row * columns..][..columns]);
        }
        parts
    }

    /// Sends data of this level's rows back to the rows of the previous level. A row that was sent
    /// to several peers gets the sum of what they return, in peer order.
    pub(super) fn back(
        &self,
        comm: &dyn Communicator,
        group: &Group,
        what: &str,
        data: &Tensor,
    ) -> Result<Tensor, CommError> {
        let columns = data.columns();
        let dtype = data.dtype();
        let parts = self
            .parts(&data.f32(), columns)
            .into_iter()
            .map(|part| Tensor::message(part, dtype))
            .collect();
        let arrived = group.all_to_all(comm, what, parts)?.wait(comm)?;
        let arrived = unpack(&arrived, dtype);
        let rows = self.rows_before();
        let mut out = vec![-0.0; rows * columns];
        for (indices, values) in self.sent.iter().zip(&arrived) {
            for (&row, value) in indices.iter().zip(values.chunks(columns.max(1))) {
                add(&mut out[row as usize * columns..][..columns], value);
            }
        }
        Ok(Tensor::new(vec![rows, columns], out, dtype))
    }

    /// Number of rows at the level before this one.
    pub(super) fn rows_before(&self) -> usize {
        let last = self.sent.iter().filter_map(|s| s.last()).max();
        last.map_or(0, |&i| i as usize + 1)
    }
}

/// The numbers in messages of this type.
fn unpack(arrived: &[Message], dtype: DType) -> Vec<Vec<f32>> {
    let numbers = arrived.iter().map(|bytes| Tensor::numbers(bytes, dtype));
    numbers.collect()
}

/// Values by which experts are ranked, per row of logits; the largest are chosen. Experts whose
/// group is not among the best get −∞.
pub(super) fn ranking<'l>(
    logits: &'l [f32],
    experts: usize,
    router: &Router,
    bias: Option<&[f32]>,
) -> Cow<'l, [f32]> {
    if !router.sigmoid && router.groups == 1 && bias.is_none() {
        return Cow::Borrowed(logits);
    }
    let mut out = logits.to_vec();
    for row in out.chunks_mut(experts) {
        if router.sigmoid {
            row.iter_mut().for_each(|x| *x = sigmoid(*x));
        } else if bias.is_some() {
            // Softmax keeps the order of logits and of groups, so it is needed with a bias only.
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = row.iter().map(|x| exp(x - largest)).sum();
            row.iter_mut().for_each(|x| *x = exp(*x - largest) / sum);
        }
        for (x, b) in row.iter_mut().zip(bias.unwrap_or_default()) {
            *x += b;
        }
        let size = experts / router.groups as usize;
        let mut groups: Vec<(f32, usize)> = row
            .chunks(size)
            .map(|group| group_score(group, router.sigmoid))
            .zip(0..)
            .collect();
        groups.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for &(_, group) in &groups[router.best_groups as usize..] {
            row[group * size..(group + 1) * size].fill(f32::NEG_INFINITY);
        }
    }
    Cow::Owned(out)
}

/// The best score of a group, or the sum of its two best scores if `two`.
fn group_score(group: &[f32], two: bool) -> f32 {
    let mut best = [f32::NEG_INFINITY; 2];
    for &x in group {
        if x > best[0] {
            best = [x, best[0]];
        } else if x > best[1] {
            best[1] = x;
        }
    }
    match two && group.len() > 1 {
        true => best[0] + best[1],
        false => best[0],
    }
}

/// Scores of the chosen experts: sigmoids or a softmax over all experts, normalised to 1 if asked.
fn scores(row: &[f32], chosen: &[u32], router: &Router) -> Vec<f32> {
    if router.sigmoid {
        let of = |&e: &u32| sigmoid(row[e as usize]);
        let mut scores: Vec<f32> = chosen.iter().map(of).collect();
        if router.normalise {
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|s| *s /= sum);
        }
        return scores;
    }
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = if router.normalise {
        chosen.iter().map(|&e| exp(row[e as usize] - largest)).sum()
    } else {
        row.iter().map(|x| exp(x - largest)).sum()
    };
    let of = |&e: &u32| exp(row[e as usize] - largest) / sum;
    chosen.iter().map(of).collect()
}

/// Routing weights of the chosen experts.
pub(super) fn weights(
    logits: &[f32],
    experts: usize,
    (chosen, top_k): (&[u32], usize),
    router: &Router,
) -> Vec<f32> {
    let scale = router.scale as f32;
    let rows = logits.chunks(experts).zip(chosen.chunks(top_k));
    rows.flat_map(|(row, chosen)| scores(row, chosen, router))
        .map(|s| s * scale)
        .collect()
}

/// Gradient of the router's logits from the gradient of the chosen experts' weights.
pub(super) fn weights_backward(
    logits: &[f32],
    experts: usize,
    (chosen, top_k): (&[u32], usize),
    router: &Router,
    gradient: &[f32],
) -> Vec<f32> {
    let scale = router.scale as f32;
    let mut out = vec![0.0; logits.len()];
    for (token, row) in logits.chunks(experts).enumerate() {
        let picked = token * top_k..(token + 1) * top_k;
        let chosen = &chosen[picked.clone()];
        let gradient: Vec<f32> = gradient[picked].iter().map(|g| g * scale).collect();
        let p = scores(row, chosen, router);
        let along: f32 = p.iter().zip(&gradient).map(|(p, g)| p * g).sum();
        let out = &mut out[token * experts..(token + 1) * experts];
        if !router.sigmoid && !router.normalise {
            let all: Vec<u32> = (0..experts as u32).collect();
            for (y, p) in out.iter_mut().zip(scores(row, &all, router)) {
                *y = -p * along;
            }
        }
        for ((&expert, p), g) in chosen.iter().zip(&p).zip(&gradient) {
            let x = row[expert as usize];
            out[expert as usize] += match (router.sigmoid, router.normalise) {
                (false, true) => p * (g - along),
                (false, false) => p * g,
                (true, true) => p * (1.0 - sigmoid(x)) * (g - along),
                (true, false) => p * (1.0 - p) * g,
            };
        }
    }
    out
}
