//! What a virtual stage costs: the sums over its blocks, and the data-parallel traffic that runs
//! beside them layer by layer.

use std::sync::Arc;

use catalog::prefetch::Ahead;
use catalog::{Bytes, Seconds};
use plans::ActionKind;

use crate::activation_copies::ActivationCopies;
use crate::block_cost::BlockCost;
use crate::offload::{Copies, GradientCopies};
use crate::work::{Backward, Work};

/// A row of equal blocks of a stage.
#[derive(Clone, Debug)]
pub struct Run {
    /// Number of equal blocks in the row.
    pub count: u64,
    /// Whether the activations that the blocks save for backward are in host memory.
    pub on_host: bool,
    /// Cost of each block.
    pub cost: Arc<BlockCost>,
}

/// Work and memory of one virtual stage for one micro-batch.
#[derive(Clone, Debug, Default)]
pub struct StageWork {
    /// Time of the forward pass.
    pub forward: Work,
    /// Time of the backward pass, without recomputation.
    pub backward: Backward,
    /// Time of forward kernels that run again before backward.
    pub recompute: Work,
    /// Bytes held from forward to backward.
    pub saved: Bytes,
    /// Bytes held from the input half to the weight half of a split backward.
    pub saved_for_weight: Bytes,
    /// Bytes of tensors that the stage receives and sends.
    pub passed_on: PassedOn,
    /// Peak bytes beyond what is held, during forward.
    pub transient_forward: Bytes,
    /// Peak bytes beyond what is held, during backward.
    pub transient_backward: Bytes,
    /// Traffic of the blocks, in order, if communication overlaps with them; empty otherwise.
    pub layers: Vec<LayerTraffic>,
    /// Which actions overlap with the stage's data-parallel traffic.
    pub traffic: TrafficPlan,
    /// Copies of saved activations to host memory and back.
    pub activations: ActivationCopies,
    /// Time of parameter gathering that nothing hides; it runs as an action of its own.
    pub exposed_gather: Option<Seconds>,
    /// Time of gradient reduction that nothing hides; it runs as an action of its own.
    pub exposed_reduce: Option<Seconds>,
    /// Times to copy gradients to host memory after `exposed_reduce`.
    pub copied_after_reduce: GradientCopies,
}

/// Bytes of the tensors that a virtual stage receives from other stages and sends to them, beyond what it saves for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassedOn {
    /// Buffers for the inputs and for the gradients of the outputs of all micro-batches. They are held for the whole step.
    pub buffers: Bytes,
    /// Bytes of a micro-batch's input, if it stays in its buffer and is not counted among what the stage saves; else 0.
    pub input: Bytes,
    /// Bytes that every forward pass leaves allocated until the step ends.
    pub after_forward: Bytes,
    /// Bytes that every backward pass leaves allocated until the step ends.
    pub after_backward: Bytes,
}

/// When the data-parallel traffic of a stage happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrafficPlan {
    /// Forwards during which parameters are gathered.
    pub gather_forward: When,
    /// Backwards during which parameters are gathered again.
    pub gather_backward: When,
    /// Backwards during which gradients are reduced.
    pub reduce: When,
    /// Backwards after which gradients are reduced while the device waits, if they are.
    pub exposed_reductions: When,
    /// Micro-batch of the stage's first forward.
    pub first: u32,
    /// Micro-batch of the stage's last backward.
    pub last: u32,
    /// Which gathers the first block of a pass waits for.
    pub awaited: Awaited,
    /// Whether gradients are reduced when a pass has ended, not block by block.
    pub reduces_at_end: bool,
    /// How many blocks ahead of its use a block's parameters are gathered, where every pass gathers them.
    pub ahead: Ahead,
    /// Whether the device waits until the host has added up gradients of several micro-batches.
    pub accumulation_waits: bool,
    /// Whether kernels wait for every copy of gradients to host memory, which is on their stream.
    pub copies_hold_kernels: bool,
    /// Whether the next pass waits until the gradients of this one are reduced.
    pub reductions_hold_kernels: bool,
}

impl Default for TrafficPlan {
    fn default() -> Self {
        Self {
            gather_forward: When::Never,
            gather_backward: When::Never,
            reduce: When::Never,
            exposed_reductions: When::Always,
            first: 0,
            last: 0,
            awaited: Awaited::Own,
            reduces_at_end: false,
            ahead: Ahead::USUAL,
            accumulation_waits: false,
            copies_hold_kernels: false,
            reductions_hold_kernels: false,
        }
    }
}

/// The micro-batches for which something happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum When {
    /// For no micro-batch.
    #[default]
    Never,
    /// For the first micro-batch of the step.
    First,
    /// For the last micro-batch of the step.
    Last,
    /// For every micro-batch.
    Always,
}

/// Which gathers of parameters the first block of a pass waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Awaited {
    /// Its own, as every other block does.
    #[default]
    Own,
    /// All gathers of the pass, which begin with it.
    AllOfPass,
    /// All gathers of the pass. They begin with the step.
    AllOfStep,
}

/// Data-parallel traffic of a row of equal blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerTraffic {
    /// Number of equal blocks in the row.
    pub count: u64,
    /// Index of the row's first block among the stage's layers; `None` if these are no layers.
    pub first_layer: Option<u64>,
    /// Share of one block in the stage's forward time.
    pub forward_share: f64,
    /// Share of one block in the stage's backward time, recomputation included.
    pub backward_share: f64,
    /// Time to gather one block's parameters.
    pub gather: Seconds,
    /// Whether parameters stay gathered from forward to backward, whatever other blocks do.
    pub stays_gathered: bool,
    /// Time to reduce one block's gradients.
    pub reduce: Seconds,
    /// Times of the copies of one block between device and host.
    pub copies: Copies,
    /// Time for which messages of one block's forward pass occupy the network card; 0 if gathers do not use that card.
    pub forward_card: Seconds,
    /// Time for which messages of one block's backward pass occupy the network card; 0 if neither gathers nor reductions use that card.
    pub backward_card: Seconds,
}

/// Time and memory of one action of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phase {
    /// Time of the action's own kernels and exposed collectives, without recomputation.
    pub work: Work,
    /// Time of the forward kernels that recomputation runs before the action's own work.
    pub recompute: Work,
    /// Peak bytes during the action beyond what is held.
    pub transient: Bytes,
    /// Bytes held from the action's end on.
    pub allocates: Bytes,
    /// Bytes released at the action's end.
    pub frees: Bytes,
}

impl StageWork {
    /// Time and memory of an action on this stage.
    #[must_use]
    pub fn phase(&self, kind: ActionKind) -> Phase {
        match kind {
            ActionKind::F => Phase {
                work: self.forward,
                transient: self.saved + self.transient_forward,
                allocates: self.saved + self.passed_on.after_forward,
                ..Phase::default()
            },
            ActionKind::B => Phase {
                work: self.backward.whole,
                recompute: self.recompute,
                transient: self.transient_backward,
                allocates: self.passed_on.after_backward,
                frees: self.saved,
            },
            ActionKind::I => Phase {
                work: self.backward.input,
                recompute: self.recompute,
                transient: self.transient_backward,
                allocates: self.saved_for_weight + self.passed_on.after_backward,
                frees: self.saved,
            },
            ActionKind::W => Phase {
                work: self.backward.weight,
                frees: self.saved_for_weight,
                ..Phase::default()
            },
            ActionKind::RecvF
            | ActionKind::SendF
            | ActionKind::RecvB
            | ActionKind::SendB
            | ActionKind::Unshard
            | ActionKind::Reshard
            | ActionKind::ReduceGrad
            | ActionKind::Optim => Phase::default(),
        }
    }
}

impl When {
    /// How often something happens in a step of `micro_batches` micro-batches.
    pub(crate) fn times(self, micro_batches: f64) -> f64 {
        match self {
            Self::Never => 0.0,
            Self::First | Self::Last => 1.0,
            Self::Always => micro_batches,
        }
    }
}

impl LayerTraffic {
    /// Time to gather one block's parameters again for backward.
    pub(crate) fn gather_again(&self) -> Seconds {
        match self.stays_gathered {
            true => Seconds(0.0),
            false => self.gather,
        }
    }
}

impl TrafficPlan {
    pub(crate) fn gathers(&self, kind: ActionKind) -> When {
        match kind {
            ActionKind::F => self.gather_forward,
            ActionKind::B | ActionKind::I => self.gather_backward,
            _ => When::Never,
        }
    }

    pub(crate) fn reduces(&self, kind: ActionKind) -> When {
        match kind {
            ActionKind::B | ActionKind::I => self.reduce,
            _ => When::Never,
        }
    }

    /// Whether kernels wait for the copy of a micro-batch's gradients to host memory.
    pub(crate) fn waits_for_copies(&self, micro_batch: u32) -> bool {
        self.copies_hold_kernels || self.accumulation_waits && micro_batch > self.first
    }

    /// Time of the copies of gradients that are made in this micro-batch.
    pub(crate) fn copied(&self, copies: GradientCopies, micro_batch: u32) -> Seconds {
        let mut time = copies.always;
        if micro_batch > self.first {
            time += copies.again;
        }
        if micro_batch == self.last {
            time += copies.at_last;
        }
        time
    }

    /// Whether what happens at `when` happens for this micro-batch.
    pub(crate) fn applies(&self, when: When, micro_batch: u32) -> bool {
        match when {
            When::Never => false,
            When::First => micro_batch == self.first,
            When::Last => micro_batch == self.last,
            When::Always => true,
        }
    }
}
