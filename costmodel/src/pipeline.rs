//! Cache of schedules and programs, shared by all strategies that have the same ones.

use std::sync::Arc;

use plans::program::{self, Program};
use plans::{Decisions, Schedule, ScheduleKind, Zero};

use crate::CostError;
use crate::in_flight::{InFlight, counted};
use crate::memo::Memo;
use crate::repeats::{Skipped, repeats};
use crate::sequence::Sequence;

/// What a schedule's order alone decides: the ranks of stages, and micro-batches in flight.
#[derive(Debug)]
pub struct Pipeline {
    /// Pipeline rank of every virtual stage.
    pub rank_of_stage: Vec<u32>,
    /// Virtual stages of every pipeline rank, in model order.
    pub stages_of_rank: Vec<Vec<u32>>,
    /// Micro-batches in flight at the fullest moment, per rank.
    pub in_flight: InFlight,
}

impl Pipeline {
    /// Number of tensors that a rank's stages receive for a micro-batch: every stage but the first an input, every stage but the last a
    /// gradient.
    pub(crate) fn received(&self, rank: usize) -> u64 {
        let last = self.rank_of_stage.len() - 1;
        let stages = self.stages_of_rank[rank].iter();
        let tensors = |&stage: &u32| u64::from(stage > 0) + u64::from((stage as usize) < last);
        stages.map(tensors).sum()
    }
}

/// Schedule kind, pipeline ranks, virtual stages per rank, and micro-batches.
pub(crate) type ScheduleKey = (ScheduleKind, u64, u64, u64);
/// A schedule's key, the ZeRO level, and whether parameters are resharded after forward.
type ProgramKey = (ScheduleKey, Zero, bool);

/// Micro-batches per pipeline rank from which on more of them change neither the ranks of stages nor what is in flight
/// at the fullest moment (a test compares all schedules).
const STEADY: u64 = 4;
/// Number of tries with fewer micro-batches, twice as many each time, before all are simulated.
const ATTEMPTS: u32 = 3;
/// Most steps that cached sequences have together.
const MAX_STEPS: usize = 3 << 18;

/// The schedules, and the orders of their programs' actions, made so far.
#[derive(Debug)]
pub(crate) struct Pipelines {
    pipelines: Memo<ScheduleKey, Pipeline>,
    sequences: Memo<ProgramKey, Sequence>,
    /// Whether programs repeat themselves.
    repeating: Memo<ProgramKey, bool>,
}

/// The action lists of a step, or of one with fewer micro-batches.
#[derive(Debug)]
pub(crate) struct Steps {
    pub(crate) sequence: Arc<Sequence>,
    /// The groups that the action lists leave out; `None` if they are complete.
    pub(crate) skipped: Option<Skipped>,
}

impl Default for Pipelines {
    fn default() -> Self {
        Self {
            pipelines: Memo::default(),
            sequences: Memo::limited(MAX_STEPS, |sequence| sequence.steps.len()),
            repeating: Memo::default(),
        }
    }
}

impl Pipelines {
    /// The [`Pipeline`] of a strategy's schedule.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn pipeline(&self, strategy: &Decisions) -> Result<Arc<Pipeline>, CostError> {
        let (kind, pp, vpp, micro_batches) = schedule_key(strategy);
        let key = (kind, pp, vpp, steady(kind, pp, micro_batches));
        self.pipelines.get(&key, || {
            let schedule = build(&key)?;
            let mut stages_of_rank = vec![Vec::new(); pp as usize];
            for (stage, &rank) in (0..).zip(&schedule.rank_of_stage) {
                stages_of_rank[rank as usize].push(stage);
            }
            Ok(Pipeline {
                in_flight: counted(&schedule),
                rank_of_stage: schedule.rank_of_stage,
                stages_of_rank,
            })
        })
    }

    /// The action lists of a strategy.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn program(strategy: &Decisions) -> Result<Program, CostError> {
        lowered(&program_key(strategy, strategy.num_micro_batches, true))
    }

    /// The order of a strategy's actions. `apart` says whether data-parallel messages are sent by actions of their own, rather than
    /// by the passes.
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn sequence(
        &self,
        strategy: &Decisions,
        apart: bool,
    ) -> Result<Arc<Sequence>, CostError> {
        self.with(strategy, strategy.num_micro_batches, apart)
    }

    /// The order of the actions of a step with this number of micro-batches, otherwise as [`Self::sequence`].
    fn with(
        &self,
        strategy: &Decisions,
        micro_batches: u64,
        apart: bool,
    ) -> Result<Arc<Sequence>, CostError> {
        let key = program_key(strategy, micro_batches, apart);
        self.sequences.get(&key, || {
            let program = lowered(&key)?;
            Ok(Sequence::new(
                &program,
                micro_batches as u32,
                group(strategy),
            ))
        })
    }

    /// The action lists of a strategy, for as few micro-batches as show how a step repeats itself;
    /// `attempt` counts how often fewer were too few. `apart` is as in [`Self::sequence`].
    ///
    /// # Errors
    /// When there is no such schedule.
    pub(crate) fn steps(
        &self,
        strategy: &Decisions,
        apart: bool,
        attempt: u32,
    ) -> Result<Steps, CostError> {
        let whole = strategy.num_micro_batches;
        if let Some((micro_batches, group)) = shortened(strategy, attempt) {
            let key = program_key(strategy, micro_batches, apart);
            let repeating = self.repeating.get(&key, || {
                let longer = program_key(strategy, micro_batches + u64::from(group), apart);
                let [program, longer] = [lowered(&key)?, lowered(&longer)?];
                let sequence = self.with(strategy, micro_batches, apart)?;
                let last = sequence.last.as_ref();
                Ok(last.is_some_and(|last| repeats(&program, &longer, &last.positions, group)))
            })?;
            if *repeating {
                return Ok(Steps {
                    sequence: self.with(strategy, micro_batches, apart)?,
                    skipped: Some(Skipped {
                        group,
                        groups: (whole - micro_batches) as u32 / group,
                    }),
                });
            }
        }
        Ok(Steps {
            sequence: self.sequence(strategy, apart)?,
            skipped: None,
        })
    }
}

/// A number of micro-batches that is enough for a schedule to repeat itself, and how many of them
/// make a group; `None` if the strategy has too few micro-batches or its schedule does not repeat.
fn shortened(strategy: &Decisions, attempt: u32) -> Option<(u64, u32)> {
    if attempt == ATTEMPTS {
        return None;
    }
    let (pp, whole) = (strategy.pp, strategy.num_micro_batches);
    let group = u64::from(group(strategy)?);
    let least = match strategy.schedule {
        ScheduleKind::Interleaved => 4 * pp,
        ScheduleKind::GPipe | ScheduleKind::OneFOneB => pp + 2,
        ScheduleKind::ZbH1 | ScheduleKind::ZbV | ScheduleKind::DualPipeV => 2 * pp + 4,
    };
    let wanted = least << attempt;
    let micro_batches = wanted + (whole % group + group - wanted % group) % group;
    (micro_batches + group < whole).then_some((micro_batches, group as u32))
}

/// Number of micro-batches after which a schedule repeats itself; `None` if it does not.
fn group(strategy: &Decisions) -> Option<u32> {
    match strategy.schedule {
        // All forwards come before all backwards: memory does not repeat.
        ScheduleKind::GPipe => None,
        ScheduleKind::Interleaved => Some(strategy.pp as u32),
        ScheduleKind::OneFOneB
        | ScheduleKind::ZbH1
        | ScheduleKind::ZbV
        | ScheduleKind::DualPipeV => Some(1),
    }
}

fn build(&(kind, pp, vpp, micro_batches): &ScheduleKey) -> Result<Schedule, CostError> {
    plans::schedule::build(kind, pp, vpp, micro_batches)
        .map_err(|e| CostError::Trace(e.to_string()))
}

/// A number of micro-batches, at most this one, with which a schedule has as many in flight.
fn steady(kind: ScheduleKind, pp: u64, micro_batches: u64) -> u64 {
    match kind {
        // All of them are in flight.
        ScheduleKind::GPipe => micro_batches,
        _ => micro_batches.min(STEADY * pp),
    }
}

/// What tells programs apart: the schedule with its number of micro-batches, and how states are sharded. If no data-parallel message
/// is sent `apart` from passes, sharding makes no difference to the order of actions, and all strategies share the program of
/// unsharded states.
fn program_key(strategy: &Decisions, micro_batches: u64, apart: bool) -> ProgramKey {
    let (kind, pp, vpp, _) = schedule_key(strategy);
    let key = (kind, pp, vpp, micro_batches);
    match apart {
        true => (key, strategy.zero, strategy.reshard_after_forward),
        false => (key, Zero::Z0, false),
    }
}

fn lowered((schedule, zero, reshards): &ProgramKey) -> Result<Program, CostError> {
    Ok(program::lower(&build(schedule)?, *zero, *reshards))
}

pub(crate) fn schedule_key(strategy: &Decisions) -> ScheduleKey {
    (
        strategy.schedule,
        strategy.pp,
        strategy.vpp,
        strategy.num_micro_batches,
    )
}

#[cfg(test)]
mod tests {
    use plans::ActionKind;

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
                        let halves = long.ranks.iter().flatten();
                        let halves = halves.filter(|action| action.kind == ActionKind::W);
                        assert_eq!(halves.count() > 0, kind.splits_backward(), "{kind}");
                        assert_eq!(
                            counted(&long),
                            counted(&short),
                            "{kind} on {pp} ranks, {vpp} stages each, {micro_batches} micro-batches"
                        );
                    }
                }
            }
        }
    }
}
