//! Lower bounds on the time that data-parallel messages add to a step. A bound holds for all strategies of a layout and a
//! pipeline that send the same messages.
//!
//! It follows from how `StagePass::run` simulates a pass: gathers and reductions share one stream, a kernel runs slower
//! while one of them is under way, and a block waits for its parameters. In a row of equal blocks each block therefore
//! takes as long as its slowed kernels, or as long as its messages if these are longer.

use std::sync::Arc;

use catalog::Seconds;
use models::BlockClass;
use plans::{Decisions, Zero};

use crate::CostError;
use crate::block_cost::BlockCost;
use crate::blocks::BlockCosts;
use crate::shape::{Own, Shape};
use crate::stage::{LayerTraffic, Run, StageWork, TrafficPlan, When};
use crate::stage_traffic::{Together, Traffic};
use crate::traffic::DataParallel;

/// A ZeRO level, and whether parameters are freed between forward and backward.
pub(crate) type Level = (Zero, bool);

/// How long the data-parallel messages of each kind of block take, and when they are sent, for one way to shard states and
/// one axis order.
#[derive(Clone, Debug)]
pub struct Messages {
    pub(crate) level: Level,
    /// Seconds to gather the parameters of a block of each kind.
    gather: Vec<f64>,
    /// Seconds to gather the parameters of a block of each kind again for backward.
    again: Vec<f64>,
    /// Seconds to reduce the gradients of a block of each kind.
    reduce: Vec<f64>,
    plan: TrafficPlan,
    /// How often per step all gathers, and all reductions, run while nothing else does; 0 if passes hide them.
    alone: [f64; 2],
    /// Seconds that a kernel takes longer for every second in which a message is under way.
    slowdown: f64,
    /// Whether stages reduce their gradients when their last backward pass has ended: the first of the model, and the others.
    reduces_at_end: [bool; 2],
}

/// Seconds that a block of each kind computes on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels<'a> {
    pub(crate) forward: &'a [f64],
    pub(crate) backward: &'a [f64],
}

/// Lower bounds on what messages add to the time of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Added {
    /// Seconds added to the forward passes of a step.
    pub(crate) forward: f64,
    /// Seconds added to the backward passes of a step, if the schedule does not split them.
    pub(crate) backward: f64,
    /// Seconds that the whole step takes at least.
    pub(crate) step: f64,
    /// Seconds that the whole step takes at least, if the schedule does not split backward passes.
    pub(crate) whole: f64,
}

impl Messages {
    /// Messages that take no time: only their ZeRO level is known.
    pub(crate) fn of_no_time(d: &Decisions) -> Self {
        Self {
            level: (d.zero, d.reshard_after_forward),
            gather: Vec::new(),
            again: Vec::new(),
            reduce: Vec::new(),
            plan: TrafficPlan::default(),
            alone: [0.0; 2],
            slowdown: 0.0,
            reduces_at_end: [false; 2],
        }
    }

    /// Whether these are [`Messages::of_no_time`].
    pub(crate) fn take_no_time(&self) -> bool {
        self.gather.is_empty()
    }

    /// The messages of `d`, whose blocks are given by kind.
    ///
    /// # Errors
    /// If a profile has no measurement of a message.
    pub(crate) fn new(
        costs: &BlockCosts,
        d: &Decisions,
        of_kind: &[Option<&Arc<BlockCost>>],
    ) -> Result<Self, CostError> {
        let scenario = costs.scenario();
        let (runs, places) = distinct(of_kind);
        let mut stage = StageWork::default();
        let parallel = DataParallel::new(d, &scenario.cluster);
        let book = &costs.book;
        let mut traffic = Traffic::new(scenario, d, &parallel).of_any_stage();
        book.data_parallel(&mut traffic, &runs, &mut stage)?;
        // Where ranks share cores, messages are not sent block by block.
        let of_blocks = stage.layers.len() == runs.len();
        let all = |time: fn(&LayerTraffic) -> Seconds| -> Vec<f64> {
            let rows = places.iter().map(|place| place.filter(|_| of_blocks));
            rows.map(|row| row.map_or(0.0, |at| time(&stage.layers[at]).0))
                .collect()
        };
        Ok(Self {
            level: (d.zero, d.reshard_after_forward),
            gather: all(|layer| layer.gather),
            again: all(LayerTraffic::gather_again),
            reduce: all(|layer| layer.reduce),
            plan: stage.traffic,
            alone: [
                f64::from(u8::from(stage.exposed_gather.is_some())),
                match (stage.exposed_reduce, d.zero) {
                    (None, _) => 0.0,
                    _ if stage.traffic.exposed_reductions == When::Last => 1.0,
                    (Some(_), Zero::Z0 | Zero::Z1) => 1.0,
                    (Some(_), Zero::Z2 | Zero::Z3) => d.num_micro_batches as f64,
                },
            ],
            slowdown: parallel.slowdown(scenario) - 1.0,
            reduces_at_end: [true, false]
                .map(|is_first| Together::of(scenario, d, is_first).reduces_at_end),
        })
    }

    /// Bounds what the messages add to the time of a rank. The first stage of the model counts for every rank: a step begins
    /// with the first forward pass of that stage and ends with its last backward pass.
    pub(crate) fn add(&self, kernels: Kernels<'_>, shape: &Shape, rank: &Own) -> Added {
        let Self { plan, alone, .. } = self;
        let (first_stage, micro_batches) = (&shape.first_stage[..], shape.micro_batches);
        let times = |when: When| when.times(micro_batches);
        let gather = product(&rank.blocks, &self.gather);
        let reduce = product(&rank.blocks, &self.reduce);
        let again = product(&rank.blocks, &self.again);
        let gathers =
            gather * (times(plan.gather_forward) + alone[0]) + again * times(plan.gather_backward);
        let forward = match plan.gather_forward {
            When::First => self.awaited(kernels, first_stage),
            When::Always => {
                let ahead = plan.ahead.forward;
                micro_batches * self.in_forward(kernels, rank, ahead)
            }
            When::Never | When::Last => 0.0,
        };
        let often = [plan.gather_backward, plan.reduce].contains(&When::Always);
        let backward = match plan.reduce {
            _ if often => micro_batches * self.in_backward(kernels, rank),
            When::Last => {
                let last = self.followed(kernels, first_stage);
                match (rank.is_first, self.reduces_at_end) {
                    (true, [true, _]) | (false, [_, true]) => last,
                    (true, _) => last.max(self.in_last_backward(kernels, rank)),
                    (false, _) => last + self.in_last_backward(kernels, rank),
                }
            }
            _ => 0.0,
        };
        let busy = product(&rank.blocks, kernels.forward) + product(&rank.blocks, kernels.backward);
        let apart = gather * alone[0] + reduce * alone[1];
        Added {
            forward,
            backward,
            step: gathers + reduce * (times(plan.reduce) + alone[1]),
            whole: busy * micro_batches + apart,
        }
    }

    /// Seconds of a kernel that takes `kernel` seconds alone, while `messages` seconds of messages are under way.
    fn beside(&self, kernel: f64, messages: f64) -> f64 {
        kernel + self.slowdown * kernel.min(messages)
    }

    /// Seconds that gathers at the start of the step add to the first forward pass of the first
    /// stage. Gathers run one after the other, and each block waits for its own.
    fn awaited(&self, kernels: Kernels<'_>, rows: &[(usize, f64)]) -> f64 {
        let mut gathered = 0.0;
        let mut end = 0.0f64;
        for &(kind, count) in rows {
            let (gather, kernel) = (self.gather[kind], kernels.forward[kind]);
            if gather > 0.0 {
                end = end.max(gathered + gather) + kernel;
                gathered += gather * count;
                end = (end + kernel * (count - 1.0)).max(gathered + kernel);
            } else {
                end += kernel * count;
            }
        }
        let alone: f64 = rows.iter().map(|&(k, n)| kernels.forward[k] * n).sum();
        (end - alone).max(0.0)
    }

    /// Seconds from the time at which the last backward pass of the first stage would end without messages, until its gradients
    /// are reduced, if gradients are reduced once per step.
    fn followed(&self, kernels: Kernels<'_>, rows: &[(usize, f64)]) -> f64 {
        let mut end = 0.0f64;
        let mut reduced = 0.0f64;
        let mut before = 0.0;
        for &(kind, count) in rows.iter().rev() {
            let (reduce, kernel) = (self.reduce[kind], kernels.backward[kind]);
            end += self.beside(kernel, before);
            reduced = reduced.max(end) + reduce * count;
            end += self.beside(kernel, reduce) * (count - 1.0);
            reduced = reduced.max(end + reduce);
            before = reduce;
        }
        let alone: f64 = rows.iter().map(|&(k, n)| kernels.backward[k] * n).sum();
        (reduced.max(end) - alone).max(0.0)
    }

    /// Seconds added to the forward passes of one micro-batch on a rank, if every pass gathers the parameters of its blocks.
    fn in_forward(&self, kernels: Kernels<'_>, rank: &Own, ahead: u64) -> f64 {
        if ahead == 0 {
            return product(&rank.blocks, &self.gather);
        }
        self.of_repeats(rank, |kind| {
            let (kernel, gather) = (kernels.forward[kind], self.gather[kind]);
            match ahead {
                1 => self.beside(kernel, gather).max(gather) - kernel,
                _ => 0.0,
            }
        })
    }

    /// Seconds added to the backward passes of one micro-batch on a rank, if every pass gathers parameters or reduces gradients.
    fn in_backward(&self, kernels: Kernels<'_>, rank: &Own) -> f64 {
        let Self { plan, .. } = self;
        let gathers = plan.gather_backward == When::Always;
        let ahead = plan.ahead.backward;
        if gathers && ahead == 0 {
            return product(&rank.blocks, &self.again);
        }
        self.of_repeats(rank, |kind| {
            let kernel = kernels.backward[kind];
            let reduce = match plan.reduce {
                When::Always => self.reduce[kind],
                _ => 0.0,
            };
            match gathers && ahead == 1 {
                true => {
                    let gather = self.again[kind];
                    self.beside(kernel, gather).max(gather) - kernel
                }
                false => self.beside(kernel, reduce) - kernel,
            }
        })
    }

    /// Seconds added to the backward passes of the last micro-batch on a rank, if gradients are reduced once per step.
    fn in_last_backward(&self, kernels: Kernels<'_>, rank: &Own) -> f64 {
        self.of_repeats(rank, |kind| {
            let kernel = kernels.backward[kind];
            self.beside(kernel, self.reduce[kind]) - kernel
        })
    }

    fn of_repeats(&self, rank: &Own, added: impl Fn(usize) -> f64) -> f64 {
        let kinds = rank.repeats.iter().enumerate();
        kinds
            .filter(|(_, repeats)| **repeats > 0.0)
            .map(|(kind, repeats)| repeats * added(kind))
            .sum()
    }
}

/// Rows of blocks, one for all layers of equal weights, and for every kind the index of its row.
fn distinct(of_kind: &[Option<&Arc<BlockCost>>]) -> (Vec<Run>, Vec<Option<usize>>) {
    let mut runs: Vec<Run> = Vec::with_capacity(of_kind.len());
    let mut place = |cost: &Arc<BlockCost>| {
        let alike = |run: &Run| match [&run.cost, cost].map(|cost| cost.key.class) {
            [BlockClass::Layer(_), BlockClass::Layer(_)] => run.cost.weights == cost.weights,
            _ => false,
        };
        runs.iter().position(alike).unwrap_or_else(|| {
            runs.push(Run {
                count: 1,
                on_host: false,
                cost: Arc::clone(cost),
            });
            runs.len() - 1
        })
    };
    let places = of_kind.iter().map(|cost| cost.map(&mut place)).collect();
    (runs, places)
}

/// The sum of costs, each times its count.
pub(crate) fn product(counts: &[f64], costs: &[f64]) -> f64 {
    counts
        .iter()
        .zip(costs)
        .map(|(count, cost)| count * cost)
        .sum()
}
