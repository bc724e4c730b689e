//! Lower bounds that hold for every order of the same work.
//!
//! *Time.* A rank cannot start before the first micro-batch has passed every earlier stage, must do
//! all its own work, and after its last backward the gradients must still pass every earlier stage.
//! With split backward the weight halves may fill that tail, so the bound takes the larger of both
//! readings. *Memory.* What the rank holds all step, plus what its schedule holds at its fullest
//! moment. Both use prices without contention.

use catalog::{Bytes, Seconds};
use plans::{Floors, Strategy};

use crate::Scenario;
use crate::assemble::Assembled;
use crate::pipeline::Pipeline;
use crate::stage::StageWork;

/// Bounds of an assembled strategy.
#[must_use]
pub fn floors(
    scenario: &Scenario,
    strategy: &Strategy,
    assembled: &Assembled,
    pipeline: &Pipeline,
) -> Floors {
    let split = splits_backward(pipeline);
    let micro_batches = strategy.num_micro_batches as f64;
    let mut time = Seconds(0.0);
    let mut peak = Bytes(0);
    // What the owner of the first stage still has to do when the last gradient reaches it.
    let last = exposed_traffic(&assembled.stages[0])
        + assembled.optimizer[assembled.rank_of_stage[0] as usize];
    for rank in 0..strategy.pp as u32 {
        let own = || {
            assembled
                .stages
                .iter()
                .zip(assembled.rank_of_stage.iter())
                .filter(move |&(_, &owner)| owner == rank)
                .map(|(stage, _)| stage)
        };
        let first = assembled
            .rank_of_stage
            .iter()
            .position(|&owner| owner == rank)
            .expect("every rank owns a stage");
        let (head, tail) = path(assembled, first, split);
        let work: Seconds = own().map(|s| forward(s) + backward(s, split)).sum();
        let weights: Seconds = if split {
            own().map(|s| s.backward_weight.duration()).sum()
        } else {
            Seconds(0.0)
        };
        let sends = sends(strategy, assembled, rank);
        let exposed: Seconds = own().map(exposed_traffic).sum();
        let busy = (work + sends) * micro_batches;
        let with_weights = head + busy + weights * micro_batches;
        let own_end = with_weights + exposed + assembled.optimizer[rank as usize];
        time = time.max(own_end).max(head + busy + tail + last);
        let held: Bytes = pipeline.in_flight.ranks[rank as usize]
            .iter()
            .map(|&(stage, count)| assembled.stages[stage as usize].saved * u64::from(count))
            .sum();
        peak = peak.max(assembled.resident[rank as usize] + held);
    }
    let step = scenario.runtime.overheads.step.value;
    // Sums are taken in another order than the engine's; a relative 1e-9 covers the rounding.
    Floors {
        time: (time + step) * (1.0 - 1e-9),
        memory: scenario.with_fragmentation(peak),
    }
}

fn splits_backward(pipeline: &Pipeline) -> bool {
    pipeline
        .schedule
        .ranks
        .iter()
        .any(|actions| actions.iter().any(|a| a.kind == plans::ActionKind::W))
}

fn forward(stage: &StageWork) -> Seconds {
    stage.forward.duration()
}

/// Backward until the input gradient exists; whole when nothing splits it.
fn backward(stage: &StageWork, split: bool) -> Seconds {
    if split {
        // A schedule may still run a fused backward, which is no shorter than this in sum.
        return (stage.recompute + stage.backward_input).device();
    }
    (stage.recompute + stage.backward_input + stage.backward_weight).duration()
}

/// Time for the first forward to reach `stage`, and for the last gradient to leave it.
fn path(assembled: &Assembled, stage: usize, split: bool) -> (Seconds, Seconds) {
    let mut head = Seconds(0.0);
    let mut tail = Seconds(0.0);
    for (index, earlier) in assembled.stages[..stage].iter().enumerate() {
        head += forward(earlier);
        tail += backward(earlier, split);
        if assembled.rank_of_stage[index] != assembled.rank_of_stage[index + 1] {
            head += assembled.transfer;
            tail += assembled.transfer;
        }
    }
    (head, tail)
}

/// Transfers of one micro-batch that occupy the rank's compute stream.
fn sends(strategy: &Strategy, assembled: &Assembled, rank: u32) -> Seconds {
    if strategy.overlap.pipeline {
        return Seconds(0.0);
    }
    let owners = &assembled.rank_of_stage;
    let crossings = owners
        .windows(2)
        .filter(|pair| pair[0] != pair[1])
        .map(|pair| u32::from(pair[0] == rank) + u32::from(pair[1] == rank))
        .sum::<u32>();
    // The tail already counts the last gradient's transfer once.
    let counted = if crossings > 0 {
        1.0 / strategy.num_micro_batches as f64
    } else {
        0.0
    };
    assembled.transfer * (f64::from(crossings) - counted)
}

/// Traffic that runs as an action of its own, or before the first block.
fn exposed_traffic(stage: &StageWork) -> Seconds {
    let zero = Seconds(0.0);
    stage.exposed_reduce.unwrap_or(zero)
}
