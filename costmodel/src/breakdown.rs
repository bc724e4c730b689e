//! Explains the time of a step by what one pipeline rank spends it on: compute, exposed communication, the optimizer, waiting.
//!
//! The rank is the one that is busy longest, because the others wait for it.

use catalog::Seconds;
use plans::Breakdown;
use plans::program::Program;

use crate::assemble::Assembled;
use crate::engine::Outcome;
use crate::sequence::{PASSES, Passes, passes};

/// What every pipeline rank spends its time on, one breakdown per rank. The bubble, in which a rank waits for others, is 0 in them.
pub(crate) struct Parts(Vec<Breakdown>);

impl Parts {
    /// Adds up what the ranks of a simulated step did. `program` must be that of the whole step, not of a shortened one.
    pub(crate) fn of(assembled: &Assembled, program: &Program, outcome: &Outcome) -> Self {
        let passes = passes_run(assembled, &passes(program));
        let of_ranks = passes.chunks(assembled.classes.len()).enumerate();
        Self(
            of_ranks
                .map(|(rank, passes)| of_rank(assembled, outcome, rank, passes))
                .collect(),
        )
    }

    /// The index of the pipeline rank that is busy longest. Waiting for pipeline transfers does not count as busy.
    pub(crate) fn critical(&self) -> usize {
        let busy = |rank: usize| self.0[rank].total() - self.0[rank].pp_exposed_s;
        (0..self.0.len())
            .max_by(|&a, &b| busy(a).total_cmp(&busy(b)).then(b.cmp(&a)))
            .expect("there is a rank")
    }

    /// The breakdown of the step: that of the critical rank, completed by what the whole step waits for. The time of the step that
    /// no part explains is the bubble; without a pipeline it is host time, because a rank then waits for no other rank, but single
    /// blocks wait for the host. The host's work between steps counts as host time.
    pub(crate) fn of_step(&self, outcome: &Outcome) -> Breakdown {
        let slowest = outcome.ranks.iter().fold(Seconds(0.0), |t, r| t.max(r.end));
        let mut parts = self.0[self.critical()];
        let (waits, link) = (outcome.waits, outcome.link);
        parts.imbalance_s = waits.imbalance.0;
        parts.stragglers_s = waits.stragglers.0;
        parts.pp_exposed_s += link.0;
        parts.host_s += (outcome.step_time - waits.imbalance - waits.stragglers - link - slowest).0;
        parts.bubble_s = 0.0;
        let unexplained = (outcome.step_time.0 - parts.total()).max(0.0);
        match outcome.ranks.len() {
            1 => parts.host_s += unexplained,
            _ => parts.bubble_s = unexplained,
        }
        parts
    }
}

/// The breakdown of one rank. `passes` has, for every class of stages, how many passes of each kind the rank runs.
fn of_rank(assembled: &Assembled, outcome: &Outcome, rank: usize, passes: &[Passes]) -> Breakdown {
    let (ran, update) = (&outcome.ranks[rank], &assembled.ranks[rank]);
    let mut parts = Breakdown {
        pp_exposed_s: ran.transfers.0,
        dp_exposed_s: ran.data.0,
        optimizer_s: (update.optimizer + update.host.copies).0,
        offload_exposed_s: ran.offload.0,
        ..Breakdown::default()
    };
    for (class, counts) in assembled.classes.iter().zip(passes) {
        for (kind, &count) in PASSES.into_iter().zip(counts).filter(|(_, n)| **n > 0) {
            let phase = class.work.phase(kind);
            let work = phase.work * count as f64;
            parts.compute_s += work.compute.0;
            parts.tp_exposed_s += work.tp.0;
            parts.cp_exposed_s += work.cp.0;
            parts.ep_exposed_s += work.ep.0;
            parts.dp_exposed_s += work.dp.0;
            parts.recompute_s += phase.recompute.device().0 * count as f64;
            let both = phase.work + phase.recompute;
            parts.host_s += both.host_wait().0 * count as f64;
        }
    }
    parts.scale(ran.stretch);
    parts
}

/// How many passes of each kind every rank runs of every class of stages. Entry `rank · classes + class` belongs to that rank and
/// class; `of_stages` are the numbers for each virtual stage.
fn passes_run(assembled: &Assembled, of_stages: &[Passes]) -> Vec<Passes> {
    let classes = assembled.classes.len();
    let mut all = vec![Passes::default(); assembled.ranks.len() * classes];
    let owners = assembled.rank_of_stage().iter();
    let owners = owners.zip(&assembled.class_of_stage);
    for ((&rank, &class), passes) in owners.zip(of_stages) {
        let sums = &mut all[rank as usize * classes + class as usize];
        for (sum, count) in sums.iter_mut().zip(passes) {
            *sum += count;
        }
    }
    all
}
