//! Cache of schedules and programs, shared by all strategies that have the same ones.

use std::sync::Arc;

use plans::{Program, Schedule, ScheduleKind, Strategy, Zero, program};

use crate::CostError;
use crate::memo::Memo;
use crate::profile::InFlight;

/// A schedule with what follows from its order alone.
#[derive(Debug)]
pub struct Pipeline {
    /// The action lists.
    pub schedule: Schedule,
    /// Pipeline rank of every virtual stage.
    pub rank_of_stage: Arc<Vec<u32>>,
    /// Micro-batches in flight at the fullest moment, per rank.
    pub in_flight: InFlight,
}

/// Schedule kind, pipeline ranks, virtual stages per rank, and micro-batches.
type ScheduleKey = (ScheduleKind, u64, u64, u64);
/// A schedule's key, the ZeRO level, and whether parameters are resharded after forward.
type ProgramKey = (ScheduleKey, Zero, bool);

/// The schedules and programs made so far.
#[derive(Debug, Default)]
pub(crate) struct Pipelines {
    schedules: Memo<ScheduleKey, Pipeline>,
    programs: Memo<ProgramKey, Program>,
}

impl Pipelines {
    /// The schedule of a strategy.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn pipeline(&self, strategy: &Strategy) -> Result<Arc<Pipeline>, CostError> {
        let key = schedule_key(strategy);
        self.schedules.get(&key, || {
            let (kind, pp, vpp, micro_batches) = key;
            let schedule = plans::schedule::build(kind, pp, vpp, micro_batches)
                .map_err(|e| CostError::Trace(e.to_string()))?;
            let in_flight = InFlight::of(&schedule);
            let rank_of_stage = Arc::new(schedule.rank_of_stage.clone());
            Ok(Pipeline {
                schedule,
                rank_of_stage,
                in_flight,
            })
        })
    }

    /// The action lists of a strategy.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn program(&self, strategy: &Strategy) -> Result<Arc<Program>, CostError> {
        let key = (
            schedule_key(strategy),
            strategy.zero,
            strategy.reshard_after_forward,
        );
        self.programs.get(&key, || {
            Ok(program::lower(&self.pipeline(strategy)?.schedule, strategy))
        })
    }
}

fn schedule_key(strategy: &Strategy) -> ScheduleKey {
    (
        strategy.schedule,
        strategy.pp,
        strategy.vpp,
        strategy.num_micro_batches,
    )
}
