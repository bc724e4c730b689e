//! List scheduling of split backward passes under a memory limit: how the zero-bubble schedules
//! are found (Qi et al. 2023, §3.1: heuristics on unit times; memory in units of one micro-batch).
//!
//! Time advances in units. A free rank prefers the input half of a backward, because others wait
//! for it; then a forward, if its memory allows; then a weight half, which nobody waits for.

use super::{Action, ActionKind, action};

/// What the greedy scheduler is given.
pub(super) struct Greedy {
    /// Rank of every stage in model order.
    pub(super) rank_of_stage: Vec<u32>,
    /// Pipeline ranks.
    pub(super) ranks: u32,
    /// Micro-batches.
    pub(super) micro_batches: u32,
    /// Chunk passes whose activations a rank may hold, from forward to weight half.
    pub(super) memory_limit: Vec<u32>,
    /// Micro-batches of stage `s` in flight at most, if the first stage is to leave room.
    pub(super) first_stage_limit: Vec<u32>,
}

struct Rank {
    free_at: u32,
    held: u32,
    actions: Vec<Action>,
    weights: std::collections::VecDeque<(u32, u32)>,
}

impl Greedy {
    pub(super) fn schedule(&self) -> Vec<Vec<Action>> {
        let stages = self.rank_of_stage.len();
        let m = self.micro_batches;
        let mut forward_done = vec![vec![u32::MAX; m as usize]; stages];
        let mut input_done = vec![vec![u32::MAX; m as usize]; stages];
        let mut next_forward = vec![0u32; stages];
        let mut next_input = vec![0u32; stages];
        let mut ranks: Vec<Rank> = (0..self.ranks)
            .map(|_| Rank {
                free_at: 0,
                held: 0,
                actions: Vec::new(),
                weights: Default::default(),
            })
            .collect();
        let total = stages as u64 * u64::from(m) * 3;
        let mut done = 0u64;
        let mut now = 0u32;
        while done < total {
            for index in 0..self.ranks {
                let rank = &mut ranks[index as usize];
                if rank.free_at > now {
                    continue;
                }
                let own: Vec<usize> = (0..stages)
                    .filter(|&s| self.rank_of_stage[s] == index)
                    .collect();
                let ready = |done: u32| done != u32::MAX && done <= now;
                let input = own.iter().rev().copied().find(|&s| {
                    let b = next_input[s] as usize;
                    b < m as usize
                        && ready(forward_done[s][b])
                        && (s + 1 == stages || ready(input_done[s + 1][b]))
                });
                let forward = own.iter().rev().copied().find(|&s| {
                    let b = next_forward[s] as usize;
                    let in_flight = next_forward[s] - next_input[s];
                    b < m as usize
                        && (s == 0 || ready(forward_done[s - 1][b]))
                        && rank.held < self.memory_limit[index as usize]
                        && in_flight < self.first_stage_limit[s]
                });
                let chosen = if let Some(s) = input {
                    let b = next_input[s];
                    next_input[s] += 1;
                    input_done[s][b as usize] = now + 1;
                    rank.weights.push_back((s as u32, b));
                    action(ActionKind::I, s as u32, b)
                } else if let Some(s) = forward {
                    let b = next_forward[s];
                    next_forward[s] += 1;
                    forward_done[s][b as usize] = now + 1;
                    rank.held += 1;
                    action(ActionKind::F, s as u32, b)
                } else if let Some((s, b)) = rank.weights.pop_front() {
                    rank.held -= 1;
                    action(ActionKind::W, s, b)
                } else {
                    continue;
                };
                rank.actions.push(chosen);
                rank.free_at = now + 1;
                done += 1;
            }
            now += 1;
        }
        ranks.into_iter().map(|rank| rank.actions).collect()
    }
}
