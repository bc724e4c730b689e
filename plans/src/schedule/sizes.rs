//! The sizes for which each schedule exists.

use catalog::ScheduleKind;

/// Why a schedule does not exist for these sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// A size is zero.
    #[error("a schedule needs at least one stage, chunk and micro-batch")]
    Empty,
    /// The schedule has one stage per rank, but virtual stages were requested.
    #[error("{schedule} has one stage per rank; vpp={vpp} needs interleaved, zb-v or dualpipe-v")]
    NoVirtualStages {
        /// The schedule.
        schedule: ScheduleKind,
        /// Requested virtual stages per rank.
        vpp: u64,
    },
    /// The interleaved schedule needs more than one chunk per rank.
    #[error("interleaved needs vpp of at least 2, not {vpp}")]
    NeedsVirtualStages {
        /// Requested virtual stages per rank.
        vpp: u64,
    },
    /// V-shaped schedules have two chunks per rank.
    #[error("{schedule} places two stages per rank in a V; vpp must be 2, not {vpp}")]
    NeedsTwo {
        /// The schedule.
        schedule: ScheduleKind,
        /// Requested virtual stages per rank.
        vpp: u64,
    },
    /// The interleaved schedule runs micro-batches in groups of `pp`.
    #[error("interleaved needs micro-batches in multiples of pp={pp}, not {micro_batches}")]
    NotMultiple {
        /// Number of pipeline ranks.
        pp: u64,
        /// Number of micro-batches.
        micro_batches: u64,
    },
    /// Too few micro-batches to fill the schedule.
    #[error("{schedule} needs at least {least} micro-batches on {pp} ranks, not {micro_batches}")]
    TooFew {
        /// The schedule.
        schedule: ScheduleKind,
        /// Smallest number of micro-batches that fills it.
        least: u64,
        /// Number of pipeline ranks.
        pp: u64,
        /// Number of micro-batches.
        micro_batches: u64,
    },
}

/// Checks that sizes are legal for a schedule.
///
/// # Errors
/// The rule that they break.
pub fn check(
    kind: ScheduleKind,
    pp: u64,
    vpp: u64,
    micro_batches: u64,
) -> Result<(), ScheduleError> {
    if pp == 0 || vpp == 0 || micro_batches == 0 {
        return Err(ScheduleError::Empty);
    }
    match kind {
        ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 if vpp > 1 => {
            Err(ScheduleError::NoVirtualStages {
                schedule: kind,
                vpp,
            })
        }
        ScheduleKind::Interleaved if vpp < 2 => Err(ScheduleError::NeedsVirtualStages { vpp }),
        ScheduleKind::Interleaved if !micro_batches.is_multiple_of(pp) => {
            Err(ScheduleError::NotMultiple { pp, micro_batches })
        }
        ScheduleKind::ZbV | ScheduleKind::DualPipeV if vpp != 2 => Err(ScheduleError::NeedsTwo {
            schedule: kind,
            vpp,
        }),
        ScheduleKind::DualPipeV if micro_batches < 2 * pp => Err(ScheduleError::TooFew {
            schedule: kind,
            least: 2 * pp,
            pp,
            micro_batches,
        }),
        ScheduleKind::GPipe
        | ScheduleKind::OneFOneB
        | ScheduleKind::Interleaved
        | ScheduleKind::ZbH1
        | ScheduleKind::ZbV
        | ScheduleKind::DualPipeV => Ok(()),
    }
}
