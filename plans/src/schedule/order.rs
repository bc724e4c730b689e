//! The order of actions on every rank, and the check that it is complete and free of deadlock.

use super::action::{Action, ActionKind};

/// The passes of every rank, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Pipeline rank of every virtual stage, in model order.
    pub rank_of_stage: Vec<u32>,
    /// Actions of every pipeline rank, in order.
    pub ranks: Vec<Vec<Action>>,
}

/// Why an action list is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSchedule {
    /// An action is missing, doubled, or on the wrong rank.
    #[error("rank {rank}: {action:?} is out of place")]
    Misplaced {
        /// Pipeline rank.
        rank: usize,
        /// The action that is out of place.
        action: Action,
    },
    /// Some stage did not run every micro-batch forward and backward.
    #[error("stage {stage} ran {done} of {wanted} passes")]
    Incomplete {
        /// Virtual stage.
        stage: usize,
        /// Number of passes run.
        done: u64,
        /// Number of passes that must run.
        wanted: u64,
    },
    /// Every rank waits for another one.
    #[error("deadlock: every rank waits, the first at {action:?}")]
    Deadlock {
        /// The action that the first waiting rank would run.
        action: Action,
    },
}

/// Checks that a schedule is complete and free of deadlock: every stage runs every micro-batch forward once, then
/// backward once (whole, or input half before weight half), and the order of the ranks together with the flow of data
/// has no cycle.
///
/// # Errors
/// The first rule that is broken.
pub fn validate(schedule: &Schedule, micro_batches: u64) -> Result<(), InvalidSchedule> {
    let stages = schedule.rank_of_stage.len();
    let m = micro_batches as usize;
    // State of a stage's micro-batch: 0 nothing done, 1 forward, 2 input half, 3 all.
    let mut state = vec![0u8; stages * m];
    let mut next = vec![0usize; schedule.ranks.len()];
    loop {
        let mut moved = false;
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            while let Some(&action) = actions.get(next[rank]) {
                let misplaced = InvalidSchedule::Misplaced { rank, action };
                let (s, b) = (action.stage as usize, action.micro_batch as usize);
                if s >= stages || b >= m || schedule.rank_of_stage[s] as usize != rank {
                    return Err(misplaced);
                }
                let at = |stage: usize| stage * m + b;
                let own = state[at(s)];
                let (needs, ready, becomes) = match action.kind {
                    ActionKind::F => (0, s == 0 || state[at(s - 1)] >= 1, 1),
                    ActionKind::B => (1, s + 1 == stages || state[at(s + 1)] >= 2, 3),
                    ActionKind::I => (1, s + 1 == stages || state[at(s + 1)] >= 2, 2),
                    ActionKind::W => (2, true, 3),
                    _ => return Err(misplaced),
                };
                if own != needs {
                    return Err(misplaced);
                }
                if !ready {
                    break;
                }
                state[at(s)] = becomes;
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        if let Some(&action) = actions.get(next[rank]) {
            return Err(InvalidSchedule::Deadlock { action });
        }
    }
    for stage in 0..stages {
        let done = (0..m).filter(|&b| state[stage * m + b] == 3).count() as u64;
        if done != micro_batches {
            return Err(InvalidSchedule::Incomplete {
                stage,
                done,
                wanted: micro_batches,
            });
        }
    }
    Ok(())
}
