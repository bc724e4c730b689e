//! Pipeline schedules as data: per rank, the order of forward and backward actions.

mod action;
mod dualpipe_v;
mod in_turn;
mod sizes;
mod zb_h1;
mod zb_v;

pub(crate) use self::action::action;
pub use self::action::{Action, ActionKind};
pub use self::sizes::{ScheduleError, check};

use catalog::ScheduleKind;

/// The passes of every rank, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Pipeline rank of every virtual stage, in model order.
    pub rank_of_stage: Vec<u32>,
    /// Actions of every pipeline rank, in order.
    pub ranks: Vec<Vec<Action>>,
}

/// The largest number of micro-batches whose forward pass has run on a pipeline rank while their backward pass has not. A
/// micro-batch counts once for each of the rank's virtual stages. `None` for schedules in which this number is the same on every
/// rank. A schedule of these sizes must exist.
#[must_use]
pub fn in_flight(
    kind: ScheduleKind,
    pp: u64,
    vpp: u64,
    micro_batches: u64,
    rank: u64,
) -> Option<u64> {
    let (p, v, m) = (pp as u32, vpp as u32, micro_batches as u32);
    let warm_up = match kind {
        ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => in_turn::warm_up(p, m, rank as u32),
        ScheduleKind::Interleaved => in_turn::warm_up_interleaved(p, v, m, rank as u32),
        ScheduleKind::GPipe | ScheduleKind::ZbV | ScheduleKind::DualPipeV => return None,
    };
    Some(u64::from(warm_up + 1).min(vpp * micro_batches))
}

/// Builds the schedule of a kind.
///
/// # Errors
/// When the schedule does not exist for these sizes.
pub fn build(
    kind: ScheduleKind,
    pp: u64,
    vpp: u64,
    micro_batches: u64,
) -> Result<Schedule, ScheduleError> {
    check(kind, pp, vpp, micro_batches)?;
    let (p, v, m) = (pp as u32, vpp as u32, micro_batches as u32);
    let of_rank = |rank| match kind {
        ScheduleKind::GPipe => in_turn::actions(p, v, m, rank, m),
        ScheduleKind::OneFOneB => in_turn::actions(p, v, m, rank, in_turn::warm_up(p, m, rank)),
        ScheduleKind::Interleaved => {
            in_turn::actions(p, v, m, rank, in_turn::warm_up_interleaved(p, v, m, rank))
        }
        ScheduleKind::ZbH1 => zb_h1::actions(p, m, rank),
        ScheduleKind::ZbV => zb_v::actions(p, m, rank),
        ScheduleKind::DualPipeV => dualpipe_v::actions(p, m, rank),
    };
    Ok(Schedule {
        rank_of_stage: rank_of_stage(kind, pp, vpp),
        ranks: (0..p).map(of_rank).collect(),
    })
}

/// The pipeline rank of every virtual stage, in model order, of a schedule that exists for these sizes: stages go around the
/// ranks, or in a V from the first rank to the last and back.
#[must_use]
pub fn rank_of_stage(kind: ScheduleKind, pp: u64, vpp: u64) -> Vec<u32> {
    let (p, v) = (pp as u32, vpp as u32);
    match kind {
        ScheduleKind::ZbV | ScheduleKind::DualPipeV => (0..p).chain((0..p).rev()).collect(),
        ScheduleKind::GPipe
        | ScheduleKind::OneFOneB
        | ScheduleKind::Interleaved
        | ScheduleKind::ZbH1 => (0..p * v).map(|stage| stage % p).collect(),
    }
}
