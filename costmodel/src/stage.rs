//! What a virtual stage costs: the sums over its blocks, and the data-parallel traffic that runs
//! beside them layer by layer.

use std::sync::Arc;

use catalog::{Bytes, Seconds};
use plans::{Action, ActionKind};

use crate::block_cost::BlockCost;
use crate::streams::{Stream, Streams};
use crate::work::{Backward, Work};

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
    /// Backward.
    pub backward: Backward,
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
            transient: Bytes(0),
            allocates: Bytes(0),
            frees: Bytes(0),
        };
        match kind {
            ActionKind::F => Phase {
                work: self.forward,
                transient: self.saved + self.transient_forward,
                allocates: self.saved,
                ..none
            },
            ActionKind::B => Phase {
                work: self.backward.whole,
                recompute: self.recompute,
                transient: self.transient_backward,
                frees: self.saved,
                ..none
            },
            ActionKind::I => Phase {
                work: self.backward.input,
                recompute: self.recompute,
                transient: self.transient_backward,
                allocates: self.saved_for_weight,
                frees: self.saved,
            },
            ActionKind::W => Phase {
                work: self.backward.weight,
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

    /// Runs an action's kernels with the data-parallel traffic of its stage beside them, block by block.
    ///
    /// A gather is issued when the block before it begins (FSDP's prefetch, Megatron's bucket look-ahead) and so goes
    /// ahead of that block's reduction, which is issued when it ends; a block waits for its parameters. Parameters
    /// gathered once per step are asked for when the optimizer is done, all stages' in turn. All traffic shares one
    /// stream, because it shares the links.
    pub(crate) fn run(&self, streams: &mut Streams, action: Action, duration: Seconds) {
        let forward = action.kind == ActionKind::F;
        let gathers = self.traffic.gathers(action);
        let reduces = self.traffic.reduces(action);
        if !gathers && !reduces {
            streams.issue(Stream::Compute, duration, None);
            return;
        }
        let at_once = self.traffic.gather_forward == When::First;
        let gather = |streams: &mut Streams, layer: Option<&LayerTraffic>| {
            let time = layer.filter(|_| gathers)?.gather;
            let asked = (!at_once).then(|| streams.end(Stream::Compute));
            (time.0 > 0.0).then(|| streams.issue(Stream::Data, time, asked))?;
            Some(streams.end(Stream::Data))
        };
        let order = |index: usize| match forward {
            true => self.layers.get(index),
            false => self.layers.iter().rev().nth(index),
        };
        let mut ready = gather(streams, order(0));
        for index in 0..self.layers.len() {
            let Some(layer) = order(index) else { continue };
            let share = match forward {
                true => layer.forward_share,
                false => layer.backward_share,
            };
            for block in 1..=layer.count {
                let next = match block == layer.count {
                    true => order(index + 1),
                    false => Some(layer),
                };
                let next = gather(streams, next);
                streams.issue(Stream::Compute, duration * share, ready);
                if reduces && layer.reduce.0 > 0.0 {
                    let done = streams.end(Stream::Compute);
                    streams.issue(Stream::Data, layer.reduce, Some(done));
                }
                ready = next;
            }
        }
    }
}

impl TrafficPlan {
    fn gathers(&self, action: Action) -> bool {
        match action.kind {
            ActionKind::F => self.applies(self.gather_forward, action.micro_batch),
            ActionKind::B | ActionKind::I => self.applies(self.gather_backward, action.micro_batch),
            _ => false,
        }
    }

    fn reduces(&self, action: Action) -> bool {
        matches!(action.kind, ActionKind::B | ActionKind::I)
            && self.applies(self.reduce, action.micro_batch)
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
