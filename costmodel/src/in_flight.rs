//! Micro-batches in flight: what a schedule's order alone says about memory.

use plans::{Action, ActionKind, Schedule};

/// For every rank, how many micro-batches of each of its stages are held at its fullest moment: pairs `(stage, count)`.
pub(crate) type InFlight = Vec<Vec<(u32, u32)>>;

/// Counts micro-batches in flight by replaying the order of every rank.
pub(crate) fn counted(schedule: &Schedule) -> InFlight {
    let fullest = |actions: &Vec<Action>| {
        let mut held = vec![0u32; schedule.rank_of_stage.len()];
        let mut total = 0u32;
        let mut most = 0u32;
        let mut best = held.clone();
        for action in actions {
            let stage = action.stage as usize;
            match action.kind {
                ActionKind::F => {
                    held[stage] += 1;
                    total += 1;
                }
                ActionKind::B | ActionKind::I => {
                    held[stage] -= 1;
                    total -= 1;
                }
                _ => {}
            }
            if total > most {
                most = total;
                best.clone_from(&held);
            }
        }
        (0u32..).zip(best).filter(|&(_, count)| count > 0).collect()
    };
    schedule.ranks.iter().map(fullest).collect()
}
