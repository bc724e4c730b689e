//! ZB-H1: 1F1B's memory, with weight halves moved into the bubble (Qi et al. 2023, §2.2 and
//! figure 3 top). Rank `r` warms up like 1F1B; its weight halves lag `r` micro-batches behind, so
//! that at most `p` micro-batches are held anywhere. Bubble: `(p − 1)(F + I − W)`.

use super::action::{Action, ActionKind, action};
use super::in_turn;

pub(super) fn actions(p: u32, m: u32, rank: u32) -> Vec<Action> {
    let warm_up = in_turn::warm_up(p, m, rank);
    let mut actions = Vec::with_capacity(3 * m as usize);
    actions.extend((0..warm_up).map(|b| action(ActionKind::F, rank, b)));
    let mut weights = 0;
    for b in 0..m {
        if warm_up + b < m {
            actions.push(action(ActionKind::F, rank, warm_up + b));
        }
        actions.push(action(ActionKind::I, rank, b));
        // Weight halves start once `rank` input halves are ahead of them, and fill the
        // cool-down one for one where 1F1B waits.
        if b >= rank {
            actions.push(action(ActionKind::W, rank, weights));
            weights += 1;
        }
    }
    actions.extend((weights..m).map(|b| action(ActionKind::W, rank, b)));
    actions
}
