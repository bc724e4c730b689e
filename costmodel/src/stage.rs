//! What a virtual stage costs: the sums over its blocks, and the data-parallel traffic that runs
//! beside them layer by layer.

use std::sync::Arc;

use catalog::{Bytes, Seconds};
use plans::{Action, ActionKind};

use crate::block_cost::BlockCost;
use crate::work::Work;

/// A run of equal blocks of a stage.
#[derive(Clone, Debug)]
pub struct Run {
    /// Equal blocks in a row.
    pub count: u64,
    /// What each costs.
    pub cost: Arc<BlockCost>,
}

/// Work and memory of one virtual stage for one micro-batch.
#[derive(Clone, Debug, Default)]
pub struct StageWork {
    /// Forward.
    pub forward: Work,
    /// Backward towards inputs.
    pub backward_input: Work,
    /// Backward towards weights.
    pub backward_weight: Work,
    /// Forward kernels run again before backward.
    pub recompute: Work,
    /// Held from forward to backward.
    pub saved: Bytes,
    /// Held from the input half to the weight half of a split backward.
    pub saved_for_weight: Bytes,
    /// Beyond what is held, during forward.
    pub transient_forward: Bytes,
    /// Beyond what is held, during backward.
    pub transient_backward: Bytes,
    /// Blocks in order, for communication that overlaps with them. Empty when none does.
    pub layers: Vec<LayerTraffic>,
    /// Which actions run traffic beside them.
    pub traffic: TrafficPlan,
    /// Parameter gathering that nothing hides (runs as an action of its own).
    pub exposed_gather: Option<Seconds>,
    /// Gradient reduction that nothing hides.
    pub exposed_reduce: Option<Seconds>,
}

/// When the data-parallel traffic of a stage happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficPlan {
    /// Parameters are gathered beside these forwards.
    pub gather_forward: When,
    /// Parameters are gathered again beside these backwards.
    pub gather_backward: When,
    /// Gradients are reduced beside these backwards.
    pub reduce: When,
    /// Micro-batch of the stage's first forward.
    pub first: u32,
    /// Micro-batch of the stage's last backward.
    pub last: u32,
}

/// For which micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum When {
    /// None.
    #[default]
    Never,
    /// The first of the step.
    First,
    /// The last of the step.
    Last,
    /// Every one.
    Always,
}

/// Data-parallel traffic of a run of equal blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerTraffic {
    /// Equal blocks in a row.
    pub count: u64,
    /// Share of the stage's forward duration of one block.
    pub forward_share: f64,
    /// Share of the stage's backward duration (recompute included) of one block.
    pub backward_share: f64,
    /// Gathering one block's parameters.
    pub gather: Seconds,
    /// Reducing one block's gradients.
    pub reduce: Seconds,
}

/// What one action of a stage does.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    /// Kernels and exposed collectives.
    pub work: Work,
    /// Of recomputation.
    pub recompute: Work,
    /// Whether data-parallel traffic may run beside it.
    pub data_parallel: bool,
    /// Memory beyond what is held.
    pub transient: Bytes,
    /// Memory held from its end on.
    pub allocates: Bytes,
    /// Memory released at its end.
    pub frees: Bytes,
}

impl StageWork {
    /// What an action of this stage does.
    #[must_use]
    pub fn phase(&self, kind: ActionKind) -> Phase {
        let none = Phase {
            work: Work::default(),
            recompute: Work::default(),
            data_parallel: false,
            transient: Bytes(0),
            allocates: Bytes(0),
            frees: Bytes(0),
        };
        match kind {
            ActionKind::F => Phase {
                work: self.forward,
                data_parallel: self.traffic.gather_forward != When::Never,
                transient: self.saved + self.transient_forward,
                allocates: self.saved,
                ..none
            },
            ActionKind::B => Phase {
                work: self.backward_input + self.backward_weight,
                recompute: self.recompute,
                data_parallel: self.backward_traffic(),
                transient: self.transient_backward,
                frees: self.saved,
                ..none
            },
            ActionKind::I => Phase {
                work: self.backward_input,
                recompute: self.recompute,
                data_parallel: self.backward_traffic(),
                transient: self.transient_backward,
                allocates: self.saved_for_weight,
                frees: self.saved,
            },
            ActionKind::W => Phase {
                work: self.backward_weight,
                frees: self.saved_for_weight,
                ..none
            },
            ActionKind::RecvF
            | ActionKind::SendF
            | ActionKind::RecvB
            | ActionKind::SendB
            | ActionKind::Unshard
            | ActionKind::Reshard
            | ActionKind::ReduceGrad
            | ActionKind::Optim => none,
        }
    }

    fn backward_traffic(&self) -> bool {
        self.traffic.gather_backward != When::Never || self.traffic.reduce != When::Never
    }

    /// Runs an action with its traffic beside it, block by block.
    ///
    /// A gather is issued when the block before it begins (FSDP's prefetch, Megatron's bucket
    /// look-ahead) and so goes ahead of that block's reduction, which is issued when it ends; a block
    /// starts when its parameters are there. All traffic shares one stream, because it shares the
    /// links. Kernels beside traffic run slower by `slowdown`. Returns the end of compute, the end of
    /// traffic, and the wait in between.
    #[must_use]
    pub fn overlapped(
        &self,
        action: Action,
        start: Seconds,
        traffic_free: Seconds,
        duration: Seconds,
        slowdown: f64,
    ) -> (Seconds, Seconds, Seconds) {
        let forward = action.kind == ActionKind::F;
        let gathers = self.traffic.gathers(action);
        let reduces = self.traffic.reduces(action);
        if !gathers && !reduces && traffic_free <= start {
            let share = |layer: &LayerTraffic| {
                if forward {
                    layer.forward_share
                } else {
                    layer.backward_share
                }
            };
            let whole: f64 = self.layers.iter().map(|l| share(l) * l.count as f64).sum();
            return (start + duration * whole, traffic_free, Seconds(0.0));
        }
        // Parameters gathered once per step are asked for when the optimizer is done, all stages'
        // in turn; those gathered for every pass one block ahead.
        let at_once = gathers && self.traffic.gather_forward == When::First;
        let mut clock = Clock {
            compute: start,
            traffic: traffic_free,
            ready: start,
        };
        let order = |index: usize| {
            if forward {
                &self.layers[index]
            } else {
                &self.layers[self.layers.len() - 1 - index]
            }
        };
        let gather_of = |index: usize| {
            if gathers && index < self.layers.len() {
                order(index).gather
            } else {
                Seconds(0.0)
            }
        };
        clock.gather(gather_of(0), if at_once { Seconds(0.0) } else { start });
        let mut exposed = Seconds(0.0);
        for index in 0..self.layers.len() {
            let layer = order(index);
            let share = if forward {
                layer.forward_share
            } else {
                layer.backward_share
            };
            let reduce = if reduces { layer.reduce } else { Seconds(0.0) };
            for block in 1..=layer.count {
                let next = gather_of(index + usize::from(block == layer.count));
                let begin = clock.begin();
                exposed += begin - clock.compute;
                clock.gather(next, if at_once { Seconds(0.0) } else { begin });
                clock.run(begin, duration * share, reduce, slowdown);
            }
        }
        (clock.compute, clock.traffic, exposed)
    }
}

impl TrafficPlan {
    fn gathers(&self, action: Action) -> bool {
        let when = match action.kind {
            ActionKind::F => self.gather_forward,
            _ => self.gather_backward,
        };
        self.applies(when, action.micro_batch)
    }

    fn reduces(&self, action: Action) -> bool {
        action.kind != ActionKind::F && self.applies(self.reduce, action.micro_batch)
    }

    fn applies(&self, when: When, micro_batch: u32) -> bool {
        match when {
            When::Never => false,
            When::First => micro_batch == self.first,
            When::Last => micro_batch == self.last,
            When::Always => true,
        }
    }
}

/// The two streams of [`StageWork::overlapped`].
struct Clock {
    compute: Seconds,
    traffic: Seconds,
    /// When the next block's parameters are there.
    ready: Seconds,
}

impl Clock {
    /// Issues a gather no earlier than `asked`.
    fn gather(&mut self, time: Seconds, asked: Seconds) {
        if time.0 > 0.0 {
            self.traffic = self.traffic.max(asked) + time;
            self.ready = self.traffic;
        }
    }

    /// When the next block may begin.
    fn begin(&self) -> Seconds {
        self.compute.max(self.ready)
    }

    /// Runs a block from `begin`, slower while traffic lasts, then issues its reduction.
    fn run(&mut self, begin: Seconds, work: Seconds, reduce: Seconds, slowdown: f64) {
        let beside = Seconds((self.traffic - begin).0.max(0.0)).min(work);
        self.compute = begin + work + beside * (slowdown - 1.0);
        if reduce.0 > 0.0 {
            self.traffic = self.traffic.max(self.compute) + reduce;
        }
    }
}
