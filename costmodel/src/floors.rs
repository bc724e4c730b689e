//! Lower bounds on time and memory that hold for every order of the same work.
//!
//! *Time.* A rank cannot start before the first micro-batch has passed every earlier stage, must do
//! all its own work, and after its last backward the gradients must still pass every earlier stage.
//! With split backward the weight halves may fill that wait, so the bound is the larger of two: work with weight
//! halves, or work without them plus the wait. Where parameters are gathered for every pass, a block waits for its own.
//! Data-parallel messages of a rank follow each other, and the optimizer waits for the last.
//! *Memory.* What the rank holds all step, plus what its schedule holds at its fullest moment and what the pass needs that runs
//! then. Both bounds use prices without contention.

use catalog::{Bytes, Seconds};
use plans::{Decisions, Zero};

use crate::assemble::Assembled;
use crate::stage::{LayerTraffic, StageWork, TrafficPlan, When};
use crate::{Scenario, messages};

/// Sums are taken in another order than in the engine; this covers the rounding.
pub(crate) const ROUNDING: f64 = 1.0 - 1e-9;

/// A lower bound on the time of an assembled strategy. `passes` is the time at which the passes and data-parallel messages of the
/// step end at least, if that was simulated; `waits` is how long the step waits for longer sequences and slow ranks.
#[must_use]
pub fn time(
    scenario: &Scenario,
    strategy: &Decisions,
    assembled: &Assembled,
    passes: Option<Seconds>,
    waits: Seconds,
) -> Seconds {
    let work: Vec<Least> = (assembled.classes.iter())
        .map(|class| Least::of(&class.work, strategy))
        .collect();
    let rank = Rank {
        micro_batches: strategy.num_micro_batches as f64,
        overlaps: messages::overlap_passes(scenario, strategy),
        ..Rank::default()
    };
    let mut ranks = vec![rank; strategy.pp as usize];
    let mut head = work[assembled.class_of_stage[0] as usize].first_gather;
    let mut tail = Seconds(0.0);
    let owners = assembled.rank_of_stage();
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
    for (rank, of) in ranks.iter_mut().zip(&assembled.ranks) {
        rank.optimizer = of.update();
    }
    // Time that the first stage's rank still needs after the last gradient has reached it.
    let first = ranks[owners[0] as usize].after();
    let ends = ranks.iter().map(|rank| rank.time(first));
    let mut time = ends.fold(Seconds(0.0), Seconds::max);
    let before_update = passes.unwrap_or_default().max(assembled.on_link);
    if before_update.0 > 0.0 {
        time = time.max(before_update + assembled.least_update());
    }
    let step = scenario.by_host(&scenario.runtime.overheads.step);
    (time + step + waits) * ROUNDING
}

/// Lower bound on each rank's memory: what it holds all step, and at its schedule's fullest moment.
/// Then a forward pass of one of its stages has ended, and a backward pass of one comes next.
pub fn memory(assembled: &Assembled) -> impl Iterator<Item = Bytes> {
    let held = |stages: &Vec<(u32, u32)>| -> Bytes {
        let of_stage = |&(stage, count)| assembled.stage(stage as usize).saved * u64::from(count);
        let least = |transient: fn(&StageWork) -> Bytes| {
            let stages = stages.iter();
            let of_stages = stages.map(|&(stage, _)| transient(assembled.stage(stage as usize)));
            of_stages.min().unwrap_or_default()
        };
        let transient = least(|s| s.transient_forward).max(least(|s| s.transient_backward));
        stages.iter().map(of_stage).sum::<Bytes>() + transient
    };
    let ranks = assembled.ranks.iter().zip(&assembled.pipeline.in_flight);
    ranks.map(move |(rank, stages)| rank.resident + held(stages))
}

/// Lower bounds on what a rank does in a step.
#[derive(Clone, Debug, Default)]
struct Rank {
    micro_batches: f64,
    /// Whether pipeline messages overlap with compute.
    overlaps: bool,
    optimizer: Seconds,
    /// Time before its first stage, and after that stage's last gradient; `None` before any stage.
    path: Option<(Seconds, Seconds)>,
    /// Work of its stages for one micro-batch, without weight halves.
    work: Seconds,
    weights: Seconds,
    /// Time of gathers, and of reductions, that run as actions of their own.
    exposed: [Seconds; 2],
    /// Least time of the reduction that follows its last backward; `None` until a stage is added.
    last_reduce: Option<Seconds>,
    /// Time of all its data-parallel messages.
    messages: Seconds,
    /// Sum of one transfer over each stage boundary to another rank, and the longest of these.
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

    /// Time after the last pass.
    fn after(&self) -> Seconds {
        self.exposed[1] + self.optimizer
    }

    fn time(&self, first: Seconds) -> Seconds {
        let micro_batches = self.micro_batches;
        let (head, tail) = self.path.unwrap_or_default();
        let head = head.max(self.exposed[0]);
        let busy = (self.work + self.sends()) * micro_batches;
        let reduce = self.last_reduce.unwrap_or_default();
        let with_weights = head + busy + self.weights * micro_batches + reduce + self.after();
        let messages = self.messages + self.optimizer;
        with_weights.max(head + busy + tail + first).max(messages)
    }

    /// Time for which this rank cannot compute because it sends or receives the pipeline messages of one micro-batch. It is zero
    /// if these messages overlap with compute.
    fn sends(&self) -> Seconds {
        if self.overlaps {
            return Seconds(0.0);
        }
        let [all, longest] = self.transfers;
        // The tail already counts one transfer of the last gradient.
        all - longest * (1.0 / self.micro_batches)
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
    fn of(stage: &StageWork, strategy: &Decisions) -> Self {
        let split = strategy.schedule.splits_backward();
        let traffic = stage.traffic;
        let micro_batches = strategy.num_micro_batches as f64;
        let forward = |time: Seconds| match traffic.gather_forward {
            When::Always => {
                let ahead = traffic.ahead.forward;
                let each = |l: &LayerTraffic| (l.forward_share, l.gather);
                paced(stage.layers.iter(), each, time, ahead)
            }
            _ => time,
        };
        let backward = |time: Seconds| match traffic.gather_backward {
            When::Always => {
                let ahead = traffic.ahead.backward;
                let each = |l: &LayerTraffic| (l.backward_share, l.gather_again());
                paced(stage.layers.iter().rev(), each, time, ahead)
            }
            _ => time,
        };
        let whole = stage.recompute + stage.backward.whole;
        // Copies of activations follow each other, and a pass waits for all of them.
        let copies = stage.activations.time * stage.activations.copied as f64;
        let first = stage.layers.first();
        let at_start = |_: &&LayerTraffic| traffic.gather_forward == When::First;
        let at_end = |_: &&LayerTraffic| !split && traffic.reduce != When::Never;
        let every_pass = matches!(strategy.zero, Zero::Z2 | Zero::Z3)
            && traffic.exposed_reductions == When::Always;
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
            messages: messages(stage, micro_batches),
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

/// Time of a stage's gathers and reductions in a step of `micro_batches` micro-batches.
fn messages(stage: &StageWork, micro_batches: f64) -> Seconds {
    let TrafficPlan {
        gather_forward,
        gather_backward,
        reduce,
        ..
    } = stage.traffic;
    let [gathers, again, reduces] =
        [gather_forward, gather_backward, reduce].map(|when| when.times(micro_batches));
    let of_block =
        |l: &LayerTraffic| l.gather * gathers + l.gather_again() * again + l.reduce * reduces;
    let of_row = |l: &LayerTraffic| of_block(l) * l.count as f64;
    stage.layers.iter().map(of_row).sum()
}

/// Least time of a pass in which every block waits for its parameters. `duration` is its time without these waits; `each` gives a block's
/// share of it, and the time to gather the block's parameters.
///
/// Gathers run one after the other. The first begins with the pass. With `ahead` = 1 the gather of another block can begin when the block
/// before it begins, with 0 when the block before it has ended.
fn paced<'a>(
    layers: impl Iterator<Item = &'a LayerTraffic>,
    each: impl Fn(&LayerTraffic) -> (f64, Seconds),
    duration: Seconds,
    ahead: u64,
) -> Seconds {
    let mut time = Seconds(0.0);
    let mut gathers = Seconds(0.0);
    let mut first = None;
    let mut block = Seconds(0.0);
    for layer in layers {
        let (share, gather) = each(layer);
        time += block.max(gather);
        block = duration * share;
        time += block.max(gather) * (layer.count - 1) as f64;
        gathers += gather * layer.count as f64;
        first.get_or_insert(gather);
    }
    let first = first.unwrap_or_default();
    match ahead {
        0 => gathers + duration,
        1 => (time + block).max(duration),
        _ => (gathers + block).max(first + duration),
    }
}

#[cfg(test)]
mod tests {
    use catalog::prefetch::Ahead;
    use plans::ActionKind;
    use proptest::prelude::*;

    use super::*;
    use crate::offload::Copies;
    use crate::stage_pass::StagePass;
    use crate::streams::{Slowdown, Stream, Streams};

    /// A stage whose blocks wait, in every pass, for parameters that are gathered so many blocks ahead: for every kind of blocks
    /// their number, the shares of one in forward and backward, and the seconds of its gather.
    fn gathering(ahead: u64, blocks: &[(u64, [f64; 2], f64)]) -> StageWork {
        let row = |&(count, [forward_share, backward_share], gather): &(u64, [f64; 2], f64)| {
            LayerTraffic {
                count,
                first_layer: None,
                forward_share,
                backward_share,
                gather: Seconds(gather),
                stays_gathered: false,
                reduce: Seconds(0.0),
                copies: Copies::default(),
                forward_card: Seconds(0.0),
                backward_card: Seconds(0.0),
            }
        };
        StageWork {
            layers: blocks.iter().map(row).collect(),
            traffic: TrafficPlan {
                gather_forward: When::Always,
                gather_backward: When::Always,
                ahead: Ahead {
                    forward: ahead,
                    backward: ahead,
                },
                ..TrafficPlan::default()
            },
            ..StageWork::default()
        }
    }

    /// Seconds of a pass whose kernels take `duration`.
    fn simulated(stage: &StageWork, kind: ActionKind, duration: f64) -> f64 {
        let mut streams = Streams::new(Slowdown::all(1.0));
        let pass = StagePass::lasting(stage, kind, Seconds(duration).into());
        pass.run(&mut streams, 0);
        Seconds::from(streams.free(Stream::Compute)).0
    }

    /// Kernels of 2, 2 and 4 seconds in forward (4, 2 and 2 in backward, which begins with the last block), and gathers of 3, 1
    /// and 5.
    #[test]
    fn blocks_wait_for_parameters_gathered_ahead_of_them() {
        let blocks = [
            (1, [0.25, 0.25], 3.0),
            (1, [0.25, 0.25], 1.0),
            (1, [0.5, 0.5], 5.0),
        ];
        let times = |blocks: &[_]| {
            [0, 1, 2, 8].map(|ahead| {
                let stage = gathering(ahead, blocks);
                [ActionKind::F, ActionKind::B].map(|kind| simulated(&stage, kind, 8.0))
            })
        };
        // None ahead: every gather is waited for, 9 + 8. One: forward waits 3 for the first block, then the third's gather begins
        // with the second block at 5 and ends at 10, and 4 follow; backward runs its first block from 5 to 9, and the last's
        // gather from 9 to 12, then 2. Two: forward gathers from 0 to 9, then 4; backward computes without a pause from 5 on.
        let expected = [[17.0; 2], [14.0; 2], [13.0; 2], [13.0; 2]];
        assert_eq!(times(&blocks), expected);
        // Four equal blocks with kernels of 2 s. With gathers of 3 s, the last block follows the
        // last gather; with gathers of 1 s, only the first is waited for.
        let slow = times(&[(4, [0.25; 2], 3.0)]);
        assert_eq!(slow, [[20.0; 2], [14.0; 2], [14.0; 2], [14.0; 2]]);
        let fast = times(&[(4, [0.25; 2], 1.0)]);
        assert_eq!(fast, [[12.0; 2], [9.0; 2], [9.0; 2], [9.0; 2]]);
    }

    proptest! {
        #[test]
        fn no_pass_is_shorter_than_its_gathers_allow(
            blocks in proptest::collection::vec((1u64..4, 0.01f64..5.0, 0.01f64..5.0, 0.0f64..6.0), 1..6),
            ahead in 0u64..9,
        ) {
            let sum = |time: fn(&(u64, f64, f64, f64)) -> f64| -> f64 {
                blocks.iter().map(|block| time(block) * block.0 as f64).sum()
            };
            let (forward, backward) = (sum(|b| b.1), sum(|b| b.2));
            let share = |b: &(u64, f64, f64, f64)| (b.0, [b.1 / forward, b.2 / backward], b.3);
            let stage = gathering(ahead, &blocks.iter().map(share).collect::<Vec<_>>());
            let layers = stage.layers.iter();
            let floors = [
                paced(layers.clone(), |l| (l.forward_share, l.gather), Seconds(forward), ahead),
                paced(layers.rev(), |l| (l.backward_share, l.gather_again()), Seconds(backward), ahead),
            ];
            let passes = [(ActionKind::F, forward), (ActionKind::B, backward)];
            for (floor, (kind, duration)) in floors.into_iter().zip(passes) {
                let time = simulated(&stage, kind, duration);
                prop_assert!(floor.0 * ROUNDING <= time, "{} {}", floor.0, time);
                // With at most one block ahead nothing else is waited for.
                prop_assert!(ahead > 1 || time < floor.0 + 1e-9, "{} {}", floor.0, time);
            }
        }
    }
}
