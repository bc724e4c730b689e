//! What a virtual stage costs: the sums over its blocks, and the data-parallel traffic that runs
//! beside them layer by layer.

use plans::{Action, ActionKind};
use spec::{Bytes, Seconds};

use crate::work::Work;

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
    /// A gather is issued one block ahead (FSDP's prefetch, Megatron's bucket look-ahead); a block
    /// starts when its parameters are there; a reduction is issued when its block ends. All traffic
    /// shares one stream, because it shares the links. Kernels beside traffic run slower by
    /// `slowdown`. Returns the end of compute, the end of traffic, and the wait in between.
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
        // Parameters gathered once per step are asked for when the optimizer is done, all stages'
        // in turn; those gathered for every pass one block ahead.
        let asked = if self.traffic.gather_forward == When::First {
            Seconds(0.0)
        } else {
            start
        };
        let mut clock = Clock {
            compute: start,
            traffic: traffic_free,
            previous: asked,
        };
        let mut exposed = Seconds(0.0);
        let layers: &mut dyn Iterator<Item = &LayerTraffic> = if forward {
            &mut self.layers.iter()
        } else {
            &mut self.layers.iter().rev()
        };
        for layer in layers {
            let share = if forward {
                layer.forward_share
            } else {
                layer.backward_share
            };
            let gather = if gathers { layer.gather } else { Seconds(0.0) };
            let reduce = if reduces { layer.reduce } else { Seconds(0.0) };
            for _ in 0..layer.count {
                exposed += clock.block(duration * share, gather, reduce, slowdown);
            }
        }
        (clock.compute, clock.traffic.max(traffic_free), exposed)
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
    /// Start of the previous block: a gather may be issued from then on.
    previous: Seconds,
}

impl Clock {
    /// Advances by one block; returns how long it waited for its parameters.
    fn block(&mut self, work: Seconds, gather: Seconds, reduce: Seconds, slowdown: f64) -> Seconds {
        let busy_from = self.traffic.max(self.previous);
        let mut wait = Seconds(0.0);
        if gather.0 > 0.0 {
            self.traffic = busy_from + gather;
            wait = Seconds((self.traffic - self.compute).0.max(0.0));
        }
        let begin = self.compute + wait;
        // Traffic still running when the block starts, or gathered ahead during it, slows it.
        let beside = Seconds((self.traffic - begin).0.max(gather.0)).min(work);
        let beside = if gather.0 > 0.0 || self.traffic > begin {
            beside
        } else {
            Seconds(0.0)
        };
        let end = begin + work + beside * (slowdown - 1.0);
        if self.previous.0 > 0.0 {
            self.previous = begin;
        }
        self.compute = end;
        if reduce.0 > 0.0 {
            self.traffic = self.traffic.max(end) + reduce;
        }
        wait
    }
}
