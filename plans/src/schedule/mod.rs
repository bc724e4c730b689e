//! Pipeline schedules as data: per rank, the order of forward and backward actions.

mod dualpipe_v;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zb_h1;
mod zb_v;

use catalog::ScheduleKind;

/// What an action does. Letters are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActionKind {
    /// Forward.
    F,
    /// Full backward: gradients of inputs and weights.
    B,
    /// Gradients of inputs only.
    I,
    /// Gradients of weights only.
    W,
    /// Receive a forward activation from the previous stage.
    RecvF,
    /// Send a forward activation to the next stage.
    SendF,
    /// Receive an output gradient from the next stage.
    RecvB,
    /// Send an input gradient to the previous stage.
    SendB,
    /// All-gather a stage's parameters (ZeRO-3, or ZeRO-1 after the step).
    Unshard,
    /// Free a stage's gathered parameters.
    Reshard,
    /// Reduce a stage's gradients over data parallelism.
    ReduceGrad,
    /// Gradient norm, clipping and the optimizer step of the rank (stage and micro-batch are 0).
    Optim,
}

/// One entry of a rank's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What to do.
    pub kind: ActionKind,
    /// Virtual stage in model order, `0..pp · vpp`.
    pub stage: u32,
    /// Micro-batch, `0..num_micro_batches`.
    pub micro_batch: u32,
}

impl ActionKind {
    /// How the kind is called in timelines and explanations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F => "F",
            Self::B => "B",
            Self::I => "I",
            Self::W => "W",
            Self::RecvF => "recv F",
            Self::SendF => "send F",
            Self::RecvB => "recv B",
            Self::SendB => "send B",
            Self::Unshard => "gather parameters",
            Self::Reshard => "free parameters",
            Self::ReduceGrad => "reduce gradients",
            Self::Optim => "optimizer",
        }
    }
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.kind.name();
        if self.kind == ActionKind::Optim {
            return f.write_str(name);
        }
        write!(f, "{name} s{} m{}", self.stage, self.micro_batch)
    }
}

/// Per-rank action lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Which rank holds each virtual stage, in model order.
    pub rank_of_stage: Vec<u32>,
    /// Action order of every pipeline rank.
    pub ranks: Vec<Vec<Action>>,
}

/// Why a schedule does not exist for these sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// A size is zero.
    #[error("a schedule needs at least one stage, chunk and micro-batch")]
    Empty,
    /// The schedule has no virtual stages.
    #[error("{schedule} has one stage per rank; vpp={vpp} needs interleaved, zb-v or dualpipe-v")]
    NoVirtualStages {
        /// Schedule.
        schedule: ScheduleKind,
        /// Asked virtual stages.
        vpp: u64,
    },
    /// Interleaving needs more than one chunk.
    #[error("interleaved needs vpp of at least 2, not {vpp}")]
    NeedsVirtualStages {
        /// Asked virtual stages.
        vpp: u64,
    },
    /// V-shaped schedules have two chunks.
    #[error("{schedule} places two stages per rank in a V; vpp must be 2, not {vpp}")]
    NeedsTwo {
        /// Schedule.
        schedule: ScheduleKind,
        /// Asked virtual stages.
        vpp: u64,
    },
    /// Interleaving runs micro-batches in groups of `pp`.
    #[error("interleaved needs micro-batches in multiples of pp={pp}, not {micro_batches}")]
    NotMultiple {
        /// Pipeline ranks.
        pp: u64,
        /// Micro-batches.
        micro_batches: u64,
    },
    /// Too few micro-batches to fill the schedule.
    #[error("{schedule} needs at least {least} micro-batches on {pp} ranks, not {micro_batches}")]
    TooFew {
        /// Schedule.
        schedule: ScheduleKind,
        /// Least.
        least: u64,
        /// Pipeline ranks.
        pp: u64,
        /// Micro-batches.
        micro_batches: u64,
    },
}

/// Why an action list is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSchedule {
    /// An action is missing, doubled, or on the wrong rank.
    #[error("rank {rank}: {action:?} is out of place")]
    Misplaced {
        /// Rank.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// Some stage did not run every micro-batch forward and backward.
    #[error("stage {stage} ran {done} of {wanted} passes")]
    Incomplete {
        /// Stage.
        stage: usize,
        /// Passes run.
        done: u64,
        /// Passes wanted.
        wanted: u64,
    },
    /// Every rank waits for another.
    #[error("deadlock: every rank waits, the first at {action:?}")]
    Deadlock {
        /// What the first waiting rank would run.
        action: Action,
    },
}

/// Checks that sizes are legal for a schedule.
///
/// # Errors
/// The rule they break.
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

/// Builds a schedule.
///
/// # Errors
/// When the sizes are illegal for it.
pub fn build(
    kind: ScheduleKind,
    pp: u64,
    vpp: u64,
    micro_batches: u64,
) -> Result<Schedule, ScheduleError> {
    check(kind, pp, vpp, micro_batches)?;
    let (p, v, m) = (pp as u32, vpp as u32, micro_batches as u32);
    let ranks = match kind {
        ScheduleKind::GPipe => gpipe::ranks(p, m),
        ScheduleKind::OneFOneB => one_f_one_b::ranks(p, m),
        ScheduleKind::Interleaved => interleaved::ranks(p, v, m),
        ScheduleKind::ZbH1 => zb_h1::ranks(p, m),
        ScheduleKind::ZbV => zb_v::ranks(p, m),
        ScheduleKind::DualPipeV => dualpipe_v::ranks(p, m),
    };
    let rank_of_stage = match kind {
        ScheduleKind::ZbV | ScheduleKind::DualPipeV => (0..p).chain((0..p).rev()).collect(),
        ScheduleKind::GPipe
        | ScheduleKind::OneFOneB
        | ScheduleKind::Interleaved
        | ScheduleKind::ZbH1 => (0..p * v).map(|stage| stage % p).collect(),
    };
    Ok(Schedule {
        rank_of_stage,
        ranks,
    })
}

/// Shorthand for an action.
pub(crate) fn action(kind: ActionKind, stage: u32, micro_batch: u32) -> Action {
    Action {
        kind,
        stage,
        micro_batch,
    }
}

/// Proves that a schedule is complete and free of deadlock: every stage runs every micro-batch
/// forward once, then backward once (whole, or input half before weight half), and the order of
/// the ranks together with the flow of data has no cycle.
///
/// # Errors
/// The first rule that is broken.
pub fn validate(schedule: &Schedule, micro_batches: u64) -> Result<(), InvalidSchedule> {
    let stages = schedule.rank_of_stage.len();
    let m = micro_batches as usize;
    // 0 nothing, 1 forward, 2 input half, 3 all.
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
