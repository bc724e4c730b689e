//! How long a step waits for ranks that happen to be slow.
//!
//! The time that a rank takes for a pass is taken as normally distributed, with a deviation that is a share of it (the
//! cluster's jitter), and as independent of other ranks and other passes. Whatever waits for several ranks waits for the
//! slowest, which takes as much more as the largest of so many normal variables is expected to be:
//!
//! - *In every pass*, ranks wait for each other that exchange messages in it: those of tensor and context parallelism, of
//!   experts, and of gathered parameters.
//! - *Within a pipeline* a stage waits for its neighbours, so passes advance at the pace of the slowest stage.
//! - *At the end of a step* the other replicas wait for the slowest.
//!
//! The first is exact but for warm-up; the second is an upper estimate, because a stage that was slow can catch up while
//! its neighbours are. 1F1B pipelines of 4 to 16 ranks whose passes are drawn in this way lose 0.64 to 0.72 of what this
//! says if no messages are exchanged within passes, and 0.92 to 0.99 where 8 ranks exchange some (a test draws them).

use catalog::Seconds;
use plans::{ActionKind, Decisions};

use crate::assemble::Assembled;
use crate::imbalance::{Largest, of_count, replicas_in_step};

/// The passes of a pipeline rank for one micro-batch.
#[derive(Clone, Copy, Default)]
struct Passes {
    /// Sum of their times, in seconds.
    time: f64,
    /// The sum of the squares of their times.
    squares: f64,
}

/// The expected time for which a step waits; `jitter` gives that of a pipeline rank.
pub(crate) fn waiting(
    d: &Decisions,
    assembled: &Assembled,
    jitter: impl Fn(usize) -> f64,
    largest: &Largest,
) -> Seconds {
    let mut of_rank = vec![Passes::default(); d.pp as usize];
    for (stage, &rank) in assembled.rank_of_stage().iter().enumerate() {
        let passes = &mut of_rank[rank as usize];
        for kind in [ActionKind::F, ActionKind::B] {
            let phase = assembled.stage(stage).phase(kind);
            let time = (phase.work + phase.recompute).duration().0;
            passes.time += time;
            passes.squares += time * time;
        }
    }
    let waits = of_rank
        .iter()
        .enumerate()
        .map(|(rank, passes)| match jitter(rank) {
            0.0 => 0.0,
            jitter => jitter * of_slowest(d, *passes, largest),
        });
    Seconds(waits.fold(0.0, f64::max))
}

/// The expected wait of a step whose slowest rank has these passes, with a jitter of 1.
fn of_slowest(d: &Decisions, passes: Passes, largest: &Largest) -> f64 {
    let of = |count| match count {
        1 => [0.0, 1.0],
        count => of_count(count, largest),
    };
    let micro_batches = d.num_micro_batches as f64;
    let together = replicas_in_step(d);
    let in_pass = d.tp * d.cp * together;
    let at_once = d.pp.min(d.num_micro_batches);
    let [slower, variance] = of(in_pass);
    let [slowest_stage, _] = of(at_once);
    let [_, of_pipeline] = of(in_pass * at_once);
    let [slowest_replica, _] = of(d.dp() / together);
    let warm_up = (d.pp - 1) as f64 / d.vpp as f64;
    let deviation = passes.squares.sqrt();
    passes.time * (micro_batches + warm_up) * slower
        + deviation * micro_batches * variance.sqrt() * slowest_stage
        + deviation * (micro_batches * of_pipeline).sqrt() * slowest_replica
}
