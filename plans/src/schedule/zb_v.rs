//! ZB-V: two chunks per rank in a V, no bubble at 1F1B's memory when F = I = W and `m ≥ 2p`
//! (Qi et al. 2024, "Pipeline parallelism with controllable memory", §4). Each rank fills its
//! memory with forwards, enters the steady pattern as its second chunk's first forward returns,
//! and drains; a weight half follows its input half except in the drain's last corner, where
//! input halves go first because other ranks wait for them.

use super::action::{Action, ActionKind, action};

/// Builds one rank's action list. Chunk 0 goes down the V, chunk 1 comes back.
struct Builder {
    stages: [u32; 2],
    micro_batches: u32,
    forward: [u32; 2],
    input: [u32; 2],
    weight: [u32; 2],
    actions: Vec<Action>,
}

impl Builder {
    /// Adds a pass of the chunk's next micro-batch. Passes of micro-batches that do not exist (the batch is shorter
    /// than the fill) keep their place in the pattern but are not emitted.
    fn push(&mut self, kind: ActionKind, chunk: usize) {
        let count = match kind {
            ActionKind::F => &mut self.forward[chunk],
            ActionKind::I => &mut self.input[chunk],
            _ => &mut self.weight[chunk],
        };
        let b = *count;
        *count += 1;
        if b < self.micro_batches {
            self.actions.push(action(kind, self.stages[chunk], b));
        }
    }

    fn backward(&mut self, chunk: usize) {
        self.push(ActionKind::I, chunk);
        self.push(ActionKind::W, chunk);
    }
}

pub(super) fn actions(p: u32, m: u32, rank: u32) -> Vec<Action> {
    let mut b = Builder {
        stages: [rank, 2 * p - 1 - rank],
        micro_batches: m,
        forward: [0; 2],
        input: [0; 2],
        weight: [0; 2],
        actions: Vec::with_capacity(6 * m as usize),
    };
    // Fill: first-chunk forwards until the second chunk's first input arrives.
    for _ in 0..2 * (p - rank) - 1 {
        b.push(ActionKind::F, 0);
    }
    for _ in 0..rank {
        b.push(ActionKind::F, 1);
        b.push(ActionKind::F, 0);
    }
    for _ in 0..p - rank {
        b.push(ActionKind::F, 1);
        b.backward(1);
    }
    // Steady: one forward and one whole backward of each chunk in turn.
    let pattern = m.max(2 * p - 1);
    while b.forward[1] < b.forward[0] || b.forward[0] < pattern {
        if b.forward[0] < pattern {
            b.push(ActionKind::F, 0);
        }
        b.backward(0);
        b.push(ActionKind::F, 1);
        b.backward(1);
    }
    // Drain.
    for _ in 0..rank {
        b.push(ActionKind::I, 0);
        b.push(ActionKind::I, 1);
    }
    for _ in 0..p - rank {
        b.backward(0);
    }
    for chunk in [1, 0] {
        while b.weight[chunk] < b.input[chunk] {
            b.push(ActionKind::W, chunk);
        }
    }
    b.actions
}
