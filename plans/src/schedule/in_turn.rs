//! Schedules in which a rank, after some forward passes, runs one forward and one backward in turn.
//!
//! - GPipe: all forwards, then all backwards (Huang et al. 2019).
//! - 1F1B: after `min(p − r − 1, m)` warm-up forwards, one forward and one backward in turn (Narayanan et al. 2021, figure 4
//!   top).
//! - Interleaved 1F1B: each rank holds `v` chunks and runs micro-batches in groups of `p` (Narayanan et al. 2021, figure 4
//!   bottom; Megatron-LM `forward_backward_pipelining_with_interleaving`). With `p` micro-batches Megatron-LM ran all forward
//!   passes first until a606486 of March 2025. Later versions do not, nor does PyTorch, nor this schedule.

use super::action::{Action, ActionKind, action};

/// Number of forward passes of a rank before its first backward, but for the one right before it, under 1F1B.
pub(super) fn warm_up(p: u32, m: u32, rank: u32) -> u32 {
    (p - rank - 1).min(m)
}

/// The same number under the interleaved schedule, where each rank holds `v` chunks.
pub(super) fn warm_up_interleaved(p: u32, v: u32, m: u32, rank: u32) -> u32 {
    ((p - rank - 1) * 2 + (v - 1) * p).min(m * v)
}

/// The actions of a rank with `v` chunks that warms up with `warm_up` forward passes.
pub(super) fn actions(p: u32, v: u32, m: u32, rank: u32, warm_up: u32) -> Vec<Action> {
    let total = m * v;
    let forward = |k: u32| {
        let (chunk, b) = position(p, v, k);
        action(ActionKind::F, chunk * p + rank, b)
    };
    let backward = |k: u32| {
        let (chunk, b) = position(p, v, k);
        action(ActionKind::B, (v - 1 - chunk) * p + rank, b)
    };
    let mut actions = Vec::with_capacity(2 * total as usize);
    actions.extend((0..warm_up).map(forward));
    for k in 0..total - warm_up {
        actions.push(forward(warm_up + k));
        actions.push(backward(k));
    }
    actions.extend((total - warm_up..total).map(backward));
    actions
}

/// Chunk and micro-batch of a rank's `k`-th pass.
fn position(p: u32, v: u32, k: u32) -> (u32, u32) {
    let group = k / (p * v);
    let within = k % (p * v);
    (within / p, group * p + within % p)
}
