//! DualPipe-V: DeepSeek-V3's DualPipe cut in half to a V of two chunks (Sea AI Lab, "cut-in-half";
//! deepseek-ai/DualPipe `dualpipev.py`). Steps: warm-up forwards of both chunks, input and weight
//! halves in the ramps, forward–backward pairs in the middle.

use super::action::{Action, ActionKind, action};

struct Builder {
    rank: u32,
    last: u32,
    forward: [u32; 2],
    backward: [u32; 2],
    weights: std::collections::VecDeque<(u32, u32)>,
    actions: Vec<Action>,
}

impl Builder {
    fn stage(&self, chunk: usize) -> u32 {
        if chunk == 0 {
            self.rank
        } else {
            self.last - self.rank
        }
    }

    fn forward(&mut self, chunk: usize) {
        let stage = self.stage(chunk);
        self.actions
            .push(action(ActionKind::F, stage, self.forward[chunk]));
        self.forward[chunk] += 1;
    }

    fn backward(&mut self, chunk: usize, split: bool) {
        let (stage, b) = (self.stage(chunk), self.backward[chunk]);
        self.backward[chunk] += 1;
        if split {
            self.actions.push(action(ActionKind::I, stage, b));
            self.weights.push_back((stage, b));
        } else {
            self.actions.push(action(ActionKind::B, stage, b));
        }
    }

    fn weight(&mut self) {
        if let Some((stage, b)) = self.weights.pop_front() {
            self.actions.push(action(ActionKind::W, stage, b));
        }
    }
}

pub(super) fn actions(p: u32, m: u32, rank: u32) -> Vec<Action> {
    let mut b = Builder {
        rank,
        last: 2 * p - 1,
        forward: [0; 2],
        backward: [0; 2],
        weights: Default::default(),
        actions: Vec::with_capacity(5 * m as usize),
    };
    // 1: nF0.
    for _ in 0..(p - rank - 1) * 2 {
        b.forward(0);
    }
    // 2: nF0F1.
    for _ in 0..=rank {
        b.forward(0);
        b.forward(1);
    }
    // 3: nI1W1F1.
    for _ in 0..p - rank - 1 {
        b.backward(1, true);
        b.weight();
        b.forward(1);
    }
    // 4: nF0B1F1B0, the main part.
    for _ in 0..m - 2 * p + rank + 1 {
        b.forward(0);
        b.backward(1, false);
        b.forward(1);
        b.backward(0, false);
    }
    // 5: nB1F1B0.
    for _ in 0..p - rank - 1 {
        b.backward(1, false);
        b.forward(1);
        b.backward(0, false);
    }
    // 6: nB1B0, split from the middle on.
    let step6 = rank + 1;
    let middle = step6 / 2;
    for i in 0..step6 {
        b.backward(1, i > middle || (i == middle && rank % 2 == 1));
        b.backward(0, i >= middle);
    }
    // 7: nWB0.
    for _ in 0..p - rank - 1 {
        b.weight();
        b.backward(0, true);
    }
    // 8: nW.
    while !b.weights.is_empty() {
        b.weight();
    }
    b.actions
}
