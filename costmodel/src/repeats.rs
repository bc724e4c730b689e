//! Finds whether a pipeline schedule does the same for every group of micro-batches in the middle of a step.

use std::collections::BTreeSet;

use plans::{Action, ActionKind, Program};

/// Groups of micro-batches that action lists leave out, before their last group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Number of micro-batches in a group.
    pub group: u32,
    /// Number of groups left out.
    pub groups: u32,
}

/// Whether a schedule does the same for one more group of micro-batches as for the last but one: the action lists of
/// `longer`, which has one `group` more than the `micro_batches` of `program`, must equal those of `program` with that
/// group's actions inserted once more. The inserted actions must not include the first micro-batch, whose passes carry
/// traffic of their own.
pub(crate) fn repeats(program: &Program, micro_batches: u32, longer: &Program, group: u32) -> bool {
    if micro_batches < 2 * group + 1 {
        return false;
    }
    let [from, to] = [2, 1].map(|groups| positions(program, micro_batches - groups * group));
    let later = |action: &Action| Action {
        micro_batch: match action.kind {
            // They belong to the whole step.
            ActionKind::Optim => action.micro_batch,
            _ => action.micro_batch + group,
        },
        ..*action
    };
    let ranks = program.ranks.iter().zip(&longer.ranks);
    ranks
        .zip(from.into_iter().zip(to))
        .all(|((short, long), (from, to))| {
            let (before, after) = short.split_at(to);
            let repeated = &before[from..];
            let added = repeated.iter().chain(after).map(later);
            let whole = before.iter().copied().chain(added);
            repeated.iter().all(|action| action.micro_batch > 0) && long.iter().copied().eq(whole)
        })
}

/// For every rank, the index of the action before which it stops if nothing runs that needs a micro-batch from `limit`
/// on.
fn positions(program: &Program, limit: u32) -> Vec<usize> {
    let mut sent = BTreeSet::new();
    let mut next = vec![0; program.ranks.len()];
    loop {
        let mut moved = false;
        for (actions, next) in program.ranks.iter().zip(&mut next) {
            while let Some(action) = actions.get(*next)
                && action.micro_batch < limit
            {
                let to = |stage: u32| (action.kind == ActionKind::SendF, stage, action.micro_batch);
                match action.kind {
                    ActionKind::SendF => _ = sent.insert(to(action.stage + 1)),
                    ActionKind::SendB => _ = sent.insert(to(action.stage - 1)),
                    ActionKind::RecvF | ActionKind::RecvB => {
                        let forward = action.kind == ActionKind::RecvF;
                        if !sent.contains(&(forward, action.stage, action.micro_batch)) {
                            break;
                        }
                    }
                    _ => {}
                }
                *next += 1;
                moved = true;
            }
        }
        if !moved {
            return next;
        }
    }
}
