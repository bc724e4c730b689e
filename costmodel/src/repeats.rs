//! Finds whether a pipeline schedule does the same for every group of micro-batches in the middle of a step.

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
/// `longer`, which has one `group` more than `program`, must equal those of `program` with that group's actions inserted once
/// more. The inserted actions must not include the first micro-batch, whose passes carry traffic of their own. The first of
/// `positions` says for every rank of `program` how many of its actions can run without the last two groups; the second, without
/// the last group.
pub(crate) fn repeats(
    program: &Program,
    longer: &Program,
    positions: &[Vec<usize>; 2],
    group: u32,
) -> bool {
    let [from, to] = positions;
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
        .zip(from.iter().zip(to))
        .all(|((short, long), (&from, &to))| {
            let (before, after) = short.split_at(to);
            let repeated = &before[from..];
            let added = repeated.iter().chain(after).map(later);
            let whole = before.iter().copied().chain(added);
            repeated.iter().all(|action| action.micro_batch > 0) && long.iter().copied().eq(whole)
        })
}
