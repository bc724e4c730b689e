//! 1F1B: after `min(p − r − 1, m)` warm-up forwards, one forward and one backward in turn
//! (Narayanan et al. 2021, figure 4 top).

use super::action::{Action, ActionKind, action};

/// Number of forward passes of a rank before its first backward, but for the one right before it.
pub(super) fn warm_up(p: u32, m: u32, rank: u32) -> u32 {
    (p - rank - 1).min(m)
}

pub(super) fn ranks(p: u32, m: u32) -> Vec<Vec<Action>> {
    (0..p)
        .map(|rank| {
            let warm_up = warm_up(p, m, rank);
            let mut actions = Vec::with_capacity(2 * m as usize);
            actions.extend((0..warm_up).map(|b| action(ActionKind::F, rank, b)));
            for b in 0..m - warm_up {
                actions.push(action(ActionKind::F, rank, warm_up + b));
                actions.push(action(ActionKind::B, rank, b));
            }
            actions.extend((m - warm_up..m).map(|b| action(ActionKind::B, rank, b)));
            actions
        })
        .collect()
}
