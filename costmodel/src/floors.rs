//! Lower bounds on time and memory that hold for every order of the same work.
//!
//! *Time.* A rank cannot start before the first micro-batch has passed every earlier stage, must do
//! all its own work, and after its last backward the gradients must still pass every earlier stage.
//! With split backward the weight halves may fill that wait, so the bound is the larger of two: work with weight
//! halves, or work without them plus the wait. Where parameters are gathered for every pass, a block waits for its own.
//! Data-parallel messages of a rank follow each other, and the optimizer waits for the last.
//! *Memory.* What the rank holds all step, plus what its schedule holds at its fullest moment. Both bounds use prices
//! without contention.

use catalog::{Bytes, Seconds};
use plans::{Decisions, Zero};

use crate::Scenario;
use crate::assemble::Assembled;
use crate::pipeline::Pipeline;
use crate::stage::{LayerTraffic, StageWork, When};

/// Sums are taken in another order than in the engine; this covers the rounding.
pub(crate) const ROUNDING: f64 = 1.0 - 1e-9;

/// What is known of a strategy's time before it is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The time at which the passes of the step end if there is no data-parallel traffic, if that was simulated.
    pub passes: Option<Seconds>,
    /// Time that the step waits for longer sequences.
    pub imbalance: Seconds,
}

/// A lower bound on the time of an assembled strategy.
#[must_use]
pub fn time(
    scenario: &Scenario,
    strategy: &Decisions,
    assembled: &Assembled,
    pipeline: &Pipeline,
    known: Known,
) -> Seconds {
    let work: Vec<Least> = (assembled.classes.iter())
        .map(|class| Least::of(&class.work, strategy, pipeline.splits_backward))
        .collect();
    let mut ranks = vec![Rank::default(); strategy.pp as usize];
    let mut head = work[assembled.class_of_stage[0] as usize].first_gather;
    let mut tail = Seconds(0.0);
    let owners = &assembled.rank_of_stage;
    for (stage, &owner) in owners.iter().enumerate() {
        let least = &work[assembled.class_of_stage[stage] as usize];
        if stage > 0 && owners[stage - 1] != owner {
            let transfer = assembled.transfers[stage - 1];
            head += transfer;
            tail += transfer;
            for rank in [owners[stage - 1], owner] {
                ranks[rank as usize].crosses(transfer);
            }
        }
        ranks[owner as usize].add(least, head, tail);
        head += least.forward;
        tail += least.backward;
    }
    let of_rank = |rank: usize| Ends {
        strategy,
        optimizer: assembled.optimizer[rank].max(assembled.host[rank].total()),
        rank: &ranks[rank],
    };
    // What the owner of the first stage still has to do after the last gradient has reached it.
    let first = of_rank(owners[0] as usize).after();
    let ends = |rank| of_rank(rank).time(first);
    let mut time = (0..ranks.len()).map(ends).fold(Seconds(0.0), Seconds::max);
    if let Some(passes) = known.passes {
        let after = (0..ranks.len()).map(|rank| of_rank(rank).after());
        time = time.max(passes + after.reduce(Seconds::min).unwrap_or_default());
    }
    let step = scenario.by_host(&scenario.runtime.overheads.step);
    (time + step + known.imbalance) * ROUNDING
}

/// What every rank holds all step and at its schedule's fullest moment.
pub fn memory(assembled: &Assembled, pipeline: &Pipeline) -> impl Iterator<Item = Bytes> {
    let held = |stages: &Vec<(u32, u32)>| -> Bytes {
        let of_stage = |&(stage, count)| assembled.stage(stage as usize).saved * u64::from(count);
        stages.iter().map(of_stage).sum()
    };
    let ranks = assembled.resident.iter().zip(&pipeline.in_flight.ranks);
    ranks.map(move |(&resident, stages)| resident + held(stages))
}

/// Lower bounds on what a rank does in a step.
#[derive(Clone, Debug, Default)]
struct Rank {
    /// Time before its first stage, and after the last gradient has left that stage; none before a stage was added.
    path: Option<(Seconds, Seconds)>,
    /// Work of its stages for one micro-batch, without weight halves.
    work: Seconds,
    weights: Seconds,
    /// Time of gathers, and of reductions, that run as actions of their own.
    exposed: [Seconds; 2],
    /// Time of the reduction that follows its last backward.
    last_reduce: Option<Seconds>,
    /// Time of all its data-parallel messages.
    messages: Seconds,
    /// Time of one transfer over each of its stage boundaries to other ranks, and the longest of them.
    transfers: [Seconds; 2],
}

impl Rank {
    fn crosses(&mut self, transfer: Seconds) {
        let [all, longest] = self.transfers;
        self.transfers = [all + transfer, longest.max(transfer)];
    }

    fn add(&mut self, stage: &Least, head: Seconds, tail: Seconds) {
        self.path.get_or_insert((head, tail));
        self.work += stage.forward + stage.backward;
        self.weights += stage.weights;
        self.exposed[0] += stage.exposed[0];
        self.exposed[1] += stage.exposed[1];
        self.messages += stage.messages;
        // Which of its stages is the last to run backward depends on the schedule.
        let earlier = self.last_reduce.unwrap_or(stage.last_reduce);
        self.last_reduce = Some(earlier.min(stage.last_reduce));
    }
}

/// A rank with what decides when it ends.
struct Ends<'a> {
    strategy: &'a Decisions,
    optimizer: Seconds,
    rank: &'a Rank,
}

impl Ends<'_> {
    /// Time after the last pass.
    fn after(&self) -> Seconds {
        self.rank.exposed[1] + self.optimizer
    }

    fn time(&self, first: Seconds) -> Seconds {
        let rank = self.rank;
        let micro_batches = self.strategy.num_micro_batches as f64;
        let (head, tail) = rank.path.unwrap_or_default();
        let head = head.max(rank.exposed[0]);
        let busy = (rank.work + self.sends()) * micro_batches;
        let reduce = rank.last_reduce.unwrap_or_default();
        let with_weights = head + busy + rank.weights * micro_batches + reduce + self.after();
        let messages = rank.messages + self.optimizer;
        with_weights.max(head + busy + tail + first).max(messages)
    }

    /// Time of one micro-batch's transfers that occupy the rank's compute stream.
    fn sends(&self) -> Seconds {
        if self.strategy.overlap.pipeline {
            return Seconds(0.0);
        }
        let [all, longest] = self.rank.transfers;
        // The tail already counts one transfer of the last gradient.
        all - longest * (1.0 / self.strategy.num_micro_batches as f64)
    }
}

/// Lower bounds on the times of a stage's actions for one micro-batch.
struct Least {
    forward: Seconds,
    /// Time until the input gradient exists; all of backward if the schedule does not split it.
    backward: Seconds,
    /// Time of the rest of backward, the weight half; 0 if backward is not split.
    weights: Seconds,
    /// Time of a step's gathers, and of its reductions, that run as actions of their own.
    exposed: [Seconds; 2],
    /// Time to gather the first block at the start of the step, if that is when it is gathered.
    first_gather: Seconds,
    /// Time to reduce the gradients of the block that backward reaches last, if it overlaps with earlier passes.
    last_reduce: Seconds,
    /// Time of all messages of a step.
    messages: Seconds,
}

impl Least {
    fn of(stage: &StageWork, strategy: &Decisions, split: bool) -> Self {
        let traffic = stage.traffic;
        let micro_batches = strategy.num_micro_batches as f64;
        let forward = |time: Seconds| match traffic.gather_forward {
            When::Always => paced(stage.layers.iter(), |l| l.forward_share, time),
            _ => time,
        };
        let backward = |time: Seconds| match traffic.gather_backward {
            When::Always => paced(stage.layers.iter().rev(), |l| l.backward_share, time),
            _ => time,
        };
        let whole = stage.recompute + stage.backward.whole;
        // Copies of activations follow each other, and a pass waits for all of them.
        let copies = stage.activations.time * stage.activations.copied as f64;
        let times = |when: When| match when {
            When::Never => 0.0,
            When::First | When::Last => 1.0,
            When::Always => micro_batches,
        };
        let gathers = times(traffic.gather_forward) + times(traffic.gather_backward);
        let reduces = times(traffic.reduce);
        let messages =
            |l: &LayerTraffic| (l.gather * gathers + l.reduce * reduces) * l.count as f64;
        let first = stage.layers.first();
        let at_start = |_: &&LayerTraffic| traffic.gather_forward == When::First;
        let at_end = |_: &&LayerTraffic| !split && traffic.reduce != When::Never;
        let every_pass = matches!(strategy.zero, Zero::Z2 | Zero::Z3);
        let reductions = if every_pass { micro_batches } else { 1.0 };
        let exposed = [
            stage.exposed_gather.unwrap_or_default(),
            stage.exposed_reduce.unwrap_or_default() * reductions,
        ];
        let mut least = Self {
            forward: forward(stage.forward.duration()).max(copies),
            backward: backward(whole.duration()).max(copies),
            weights: Seconds(0.0),
            exposed,
            first_gather: first.filter(at_start).map_or(Seconds(0.0), |l| l.gather),
            last_reduce: first.filter(at_end).map_or(Seconds(0.0), |l| l.reduce),
            messages: stage.layers.iter().map(messages).sum(),
        };
        if split {
            // Even in a schedule that splits backward some passes run whole, which may be shorter than both halves
            // together.
            let input = backward((stage.recompute + stage.backward.input).device());
            let all = (least.backward).min(input + stage.backward.weight.duration());
            least.backward = input.min(backward(whole.device()));
            least.weights = all - least.backward;
        }
        least
    }
}

/// Least time of a pass of `duration` whose blocks each wait until their parameters are gathered: the first block's
/// gather is asked for when the pass begins, every other's when the block before begins.
fn paced<'a>(
    layers: impl Iterator<Item = &'a LayerTraffic>,
    share: impl Fn(&LayerTraffic) -> f64,
    duration: Seconds,
) -> Seconds {
    let mut time = Seconds(0.0);
    let mut block = Seconds(0.0);
    for layer in layers {
        time += block.max(layer.gather);
        block = duration * share(layer);
        time += block.max(layer.gather) * (layer.count - 1) as f64;
    }
    (time + block).max(duration)
}
