//! GPipe: all forwards, then all backwards (Huang et al. 2019).

use super::action::{Action, ActionKind, action};

pub(super) fn ranks(p: u32, m: u32) -> Vec<Vec<Action>> {
    (0..p)
        .map(|rank| {
            let forward = (0..m).map(|b| action(ActionKind::F, rank, b));
            let backward = (0..m).map(|b| action(ActionKind::B, rank, b));
            forward.chain(backward).collect()
        })
        .collect()
}
