//! Lower bounds on time and memory that hold for every order of the same work.
//!
//! *Time.* A rank cannot start before the first micro-batch has passed every earlier stage, must do
//! all its own work, and after its last backward the gradients must still pass every earlier stage.
//! With split backward the weight halves may fill that wait, so the bound is the larger of two: work with weight
//! halves, or work without them plus the wait. *Memory.* What the rank holds all step, plus what its schedule holds at
//! its fullest moment. Both bounds use prices without contention.

use catalog::{Bytes, Seconds};
use plans::{Floors, Strategy};

use crate::Scenario;
use crate::assemble::Assembled;
use crate::pipeline::Pipeline;
use crate::stage::StageWork;

/// Computes the bounds of an assembled strategy.
#[must_use]
pub fn floors(
    scenario: &Scenario,
    strategy: &Strategy,
    assembled: &Assembled,
    pipeline: &Pipeline,
) -> Floors {
    let split = splits_backward(pipeline);
    let micro_batches = strategy.num_micro_batches as f64;
    let least: Vec<Least> = (assembled.stages.iter())
        .map(|stage| Least::of(stage, split))
        .collect();
    let mut time = Seconds(0.0);
    let mut peak = Bytes(0);
    // What the owner of the first stage still has to do after the last gradient has reached it.
    let last = least[0].traffic + assembled.optimizer[assembled.rank_of_stage[0] as usize];
    for rank in 0..strategy.pp as u32 {
        let own = || {
            least
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
        let (head, tail) = path(assembled, &least[..first]);
        let work: Seconds = own().map(|s| s.forward + s.backward).sum();
        let weights: Seconds = own().map(|s| s.weights).sum();
        let sends = sends(strategy, assembled, rank);
        let exposed: Seconds = own().map(|s| s.traffic).sum();
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
    let step = scenario.by_host(&scenario.runtime.overheads.step);
    // Sums are taken in another order than in the engine; a relative 1e-9 covers the rounding.
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

/// Lower bounds on the times of a stage's actions for one micro-batch.
struct Least {
    forward: Seconds,
    /// Time until the input gradient exists; all of backward if the schedule does not split it.
    backward: Seconds,
    /// Time of the rest of backward, the weight half; 0 if backward is not split.
    weights: Seconds,
    /// Time of gradient reduction that runs as an action of its own, once a step.
    traffic: Seconds,
}

impl Least {
    fn of(stage: &StageWork, split: bool) -> Self {
        let whole = stage.recompute + stage.backward.whole;
        let mut least = Self {
            forward: stage.forward.duration(),
            backward: whole.duration(),
            weights: Seconds(0.0),
            traffic: stage.exposed_reduce.unwrap_or(Seconds(0.0)),
        };
        if split {
            // Even in a schedule that splits backward some passes run whole, which may be shorter than both halves
            // together.
            let input = (stage.recompute + stage.backward.input).device();
            let all = (least.backward).min(input + stage.backward.weight.duration());
            least.backward = input.min(whole.device());
            least.weights = all - least.backward;
        }
        least
    }
}

/// Time for the first forward to pass all `earlier` stages, and for the last gradient to pass them back.
fn path(assembled: &Assembled, earlier: &[Least]) -> (Seconds, Seconds) {
    let mut head = Seconds(0.0);
    let mut tail = Seconds(0.0);
    for (index, stage) in earlier.iter().enumerate() {
        head += stage.forward;
        tail += stage.backward;
        if assembled.rank_of_stage[index] != assembled.rank_of_stage[index + 1] {
            head += assembled.transfer;
            tail += assembled.transfer;
        }
    }
    (head, tail)
}

/// Time of one micro-batch's transfers that occupy the rank's compute stream.
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
