//! Cache of schedules and programs, shared by all strategies that have the same ones.

use std::sync::Arc;

use plans::{ActionKind, Decisions, Program, Schedule, ScheduleKind, Zero, program};

use crate::CostError;
use crate::memo::Memo;
use crate::profile::InFlight;

/// What follows from the order of a schedule alone.
#[derive(Debug)]
pub struct Pipeline {
    /// Pipeline rank of every virtual stage.
    pub rank_of_stage: Arc<Vec<u32>>,
    /// Micro-batches in flight at the fullest moment, per rank.
    pub in_flight: InFlight,
    /// Whether backward is split into two halves.
    pub splits_backward: bool,
}

/// Schedule kind, pipeline ranks, virtual stages per rank, and micro-batches.
type ScheduleKey = (ScheduleKind, u64, u64, u64);
/// A schedule's key, the ZeRO level, and whether parameters are resharded after forward.
type ProgramKey = (ScheduleKey, Zero, bool);

/// Micro-batches per pipeline rank from which on more of them change neither the ranks of stages nor what is in flight
/// at the fullest moment (a test compares all schedules).
const STEADY: u64 = 4;
/// Most actions that cached programs have together.
const MAX_ACTIONS: usize = 1 << 21;

/// The schedules and programs made so far.
#[derive(Debug)]
pub(crate) struct Pipelines {
    pipelines: Memo<ScheduleKey, Pipeline>,
    programs: Memo<ProgramKey, Program>,
}

impl Default for Pipelines {
    fn default() -> Self {
        let actions = |program: &Program| program.ranks.iter().map(Vec::len).sum();
        Self {
            pipelines: Memo::default(),
            programs: Memo::limited(MAX_ACTIONS, actions),
        }
    }
}

impl Pipelines {
    /// What follows from the order of a strategy's schedule.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn pipeline(&self, strategy: &Decisions) -> Result<Arc<Pipeline>, CostError> {
        let (kind, pp, vpp, micro_batches) = schedule_key(strategy);
        let key = (kind, pp, vpp, steady(kind, pp, micro_batches));
        self.pipelines.get(&key, || {
            let schedule = build(&key)?;
            let is_half = |action: &plans::Action| action.kind == ActionKind::W;
            Ok(Pipeline {
                in_flight: InFlight::of(&schedule),
                splits_backward: schedule.ranks.iter().flatten().any(is_half),
                rank_of_stage: Arc::new(schedule.rank_of_stage),
            })
        })
    }

    /// The action lists of a strategy.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn program(&self, strategy: &Decisions) -> Result<Arc<Program>, CostError> {
        let key = schedule_key(strategy);
        let of_program = (key, strategy.zero, strategy.reshard_after_forward);
        self.programs
            .get(&of_program, || Ok(program::lower(&build(&key)?, strategy)))
    }
}

fn build(&(kind, pp, vpp, micro_batches): &ScheduleKey) -> Result<Schedule, CostError> {
    plans::schedule::build(kind, pp, vpp, micro_batches)
        .map_err(|e| CostError::Trace(e.to_string()))
}

/// The number of micro-batches of a schedule that has as much in flight.
fn steady(kind: ScheduleKind, pp: u64, micro_batches: u64) -> u64 {
    match kind {
        // All of them are in flight.
        ScheduleKind::GPipe => micro_batches,
        _ => micro_batches.min(STEADY * pp),
    }
}

fn schedule_key(strategy: &Decisions) -> ScheduleKey {
    (
        strategy.schedule,
        strategy.pp,
        strategy.vpp,
        strategy.num_micro_batches,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_micro_batches_than_a_steady_schedule_has_are_not_in_flight() {
        for kind in ScheduleKind::ALL {
            for (pp, vpp) in [
                (2, 1),
                (3, 1),
                (8, 1),
                (16, 1),
                (2, 2),
                (4, 2),
                (7, 2),
                (16, 2),
                (4, 5),
            ] {
                for times in [5, 6, 9, 17] {
                    for micro_batches in [times * pp, times * pp - 1, times * pp - pp / 2] {
                        let long = (kind, pp, vpp, micro_batches);
                        let short = (kind, pp, vpp, steady(kind, pp, micro_batches));
                        let (Ok(long), Ok(short)) = (build(&long), build(&short)) else {
                            continue;
                        };
                        assert_eq!(long.rank_of_stage, short.rank_of_stage);
                        assert_eq!(
                            InFlight::of(&long),
                            InFlight::of(&short),
                            "{kind} on {pp} ranks, {vpp} stages each, {micro_batches} micro-batches"
                        );
                    }
                }
            }
        }
    }
}
