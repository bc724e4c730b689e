//! What a virtual stage costs: the sums over its blocks, and the data-parallel traffic that runs
//! beside them layer by layer.

use std::ops::Range;
use std::sync::Arc;

use catalog::runtime::Ahead;
use catalog::{Bytes, Seconds};
use plans::legality::MAX_AHEAD;
use plans::{Action, ActionKind};

use crate::activation_copies::ActivationCopies;
use crate::block_cost::BlockCost;
use crate::offload::Copies;
use crate::picoseconds::Picoseconds;
use crate::streams::{End, Stream, Streams};
use crate::work::{Backward, Work};

/// A row of equal blocks of a stage.
#[derive(Clone, Debug)]
pub struct Run {
    /// Number of equal blocks in the row.
    pub count: u64,
    /// Whether what they save for backward lies in host memory.
    pub on_host: bool,
    /// Cost of each block.
    pub cost: Arc<BlockCost>,
}

/// Most blocks that are gathered at one time.
const READY: usize = MAX_AHEAD as usize + 1;

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
    /// Time to copy the gradients of such a reduction to host memory.
    pub copied_after_reduce: Seconds,
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
    /// Micro-batch of the stage's first forward.
    pub first: u32,
    /// Micro-batch of the stage's last backward.
    pub last: u32,
    /// How many blocks ahead of its use a block's parameters are gathered, where every pass gathers them.
    pub ahead: Ahead,
    /// Whether the device waits for gradients that the host adds to those of an earlier micro-batch.
    pub accumulation_waits: bool,
}

impl Default for TrafficPlan {
    fn default() -> Self {
        Self {
            gather_forward: When::Never,
            gather_backward: When::Never,
            reduce: When::Never,
            first: 0,
            last: 0,
            ahead: Ahead::USUAL,
            accumulation_waits: false,
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

/// Data-parallel traffic of a row of equal blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerTraffic {
    /// Number of equal blocks in the row.
    pub count: u64,
    /// Number of the first among the stage's layers; `None` if they are no layers.
    pub first_layer: Option<u64>,
    /// Share of one block in the stage's forward time.
    pub forward_share: f64,
    /// Share of one block in the stage's backward time, recomputation included.
    pub backward_share: f64,
    /// Time to gather one block's parameters.
    pub gather: Seconds,
    /// Time to reduce one block's gradients.
    pub reduce: Seconds,
    /// Times of the copies of one block between device and host.
    pub copies: Copies,
}

/// Time and memory of one action of a stage.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    /// Time of the action's own kernels and exposed collectives, without recomputation.
    pub work: Work,
    /// Time of forward kernels that run again before it.
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

    /// Micro-batches, between the step's first and last, for which nothing runs beside an action's kernels.
    pub(crate) fn alone(&self, kind: ActionKind) -> Range<u32> {
        let when = [self.traffic.gathers(kind), self.traffic.reduces(kind)];
        if when.contains(&When::Always) || !self.activations.is_none() {
            return 0..0;
        }
        let TrafficPlan { first, last, .. } = self.traffic;
        let begin = if when.contains(&When::First) {
            first + 1
        } else {
            0
        };
        let end = if when.contains(&When::Last) {
            last
        } else {
            u32::MAX
        };
        begin..end
    }

    /// Runs an action's kernels with the data-parallel traffic of its stage beside them, block by block.
    ///
    /// A gather is issued when the block before it begins (FSDP's prefetch, Megatron's bucket look-ahead), or as many blocks
    /// ahead as the plan says, and so goes ahead of that block's reduction, which is issued when it ends; a block waits for
    /// its parameters. Parameters gathered once per step are requested when the optimizer is done, in turn for all stages.
    /// All traffic shares one stream, because it shares the links.
    pub(crate) fn run(&self, streams: &mut Streams, action: Action, duration: Picoseconds) {
        let forward = action.kind == ActionKind::F;
        let applies = |when| self.traffic.applies(when, action.micro_batch);
        let gathers = applies(self.traffic.gathers(action.kind));
        let reduces = applies(self.traffic.reduces(action.kind));
        let copies = !self.activations.is_none();
        if !gathers && !reduces && !copies {
            streams.issue(Stream::Compute, duration, None);
            return;
        }
        let at_once = self.traffic.gather_forward == When::First;
        let waits = self.traffic.accumulation_waits && action.micro_batch > self.traffic.first;
        let mut asked = Blocks::of(&self.layers, forward);
        let mut gather = |streams: &mut Streams| {
            let (layer, _) = asked.next().filter(|_| gathers)?;
            layer.gathered(at_once, streams)
        };
        let ahead = match forward {
            true => self.traffic.ahead.forward,
            false => self.traffic.ahead.backward,
        };
        let ahead = (ahead as usize).min(READY - 1);
        // When the parameters of the blocks that are gathered are there, by the number of the block.
        let mut ready = [None; READY];
        for ready in &mut ready[..ahead] {
            *ready = gather(streams);
        }
        let mut copying = self.activations.begin();
        for (index, (layer, at)) in Blocks::of(&self.layers, forward).enumerate() {
            ready[(index + ahead) % READY] = gather(streams);
            let share = match forward {
                true => layer.forward_share,
                false => layer.backward_share,
            };
            let at = at.filter(|_| copies);
            if let Some(at) = at.filter(|_| !forward) {
                copying.before_backward(at, streams);
            }
            streams.issue(Stream::Compute, duration.share(share), ready[index % READY]);
            if let Some(at) = at.filter(|_| forward) {
                copying.after_forward(at, streams);
            }
            if reduces {
                layer.reduced(layer.reduce.into(), waits, streams);
            }
        }
    }
}

/// The blocks of a stage in the order of a pass, each with its number among the layers if it is one.
struct Blocks<'a> {
    rows: &'a [LayerTraffic],
    forward: bool,
    /// Number of blocks of the first row that were passed.
    passed: u64,
}

impl<'a> Blocks<'a> {
    fn of(rows: &'a [LayerTraffic], forward: bool) -> Self {
        Self {
            rows,
            forward,
            passed: 0,
        }
    }
}

impl<'a> Iterator for Blocks<'a> {
    type Item = (&'a LayerTraffic, Option<u64>);

    fn next(&mut self) -> Option<Self::Item> {
        let row = match self.forward {
            true => self.rows.first()?,
            false => self.rows.last()?,
        };
        let number = match self.forward {
            true => self.passed,
            false => row.count - 1 - self.passed,
        };
        self.passed += 1;
        if self.passed == row.count {
            self.passed = 0;
            self.rows = match self.forward {
                true => &self.rows[1..],
                false => &self.rows[..self.rows.len() - 1],
            };
        }
        Some((row, row.first_layer.map(|first| first + number)))
    }
}

impl LayerTraffic {
    /// Reduces a block's gradients in `time`, and copies them to host memory if they go there; compute `waits` for the copy.
    fn reduced(&self, time: Picoseconds, waits: bool, streams: &mut Streams) {
        let mut done = streams.end(Stream::Compute);
        if time > Picoseconds::ZERO {
            streams.issue(Stream::Data, time, Some(done));
            done = streams.end(Stream::Data);
        }
        if self.copies.to_host.0 > 0.0 {
            streams.issue(Stream::ToHost, self.copies.to_host.into(), Some(done));
            if waits {
                streams.join(Stream::ToHost);
            }
        }
    }

    /// Copies a block's parameters from host memory, if they lie there, and gathers them, `at_once` or when compute has come as
    /// far as it has been issued. Returns when they are there; `None` if they always are.
    fn gathered(&self, at_once: bool, streams: &mut Streams) -> Option<End> {
        let mut asked = (!at_once).then(|| streams.end(Stream::Compute));
        let copy = self.copies.from_host;
        let copied = copy.0 > 0.0;
        if copied {
            streams.issue(Stream::FromHost, copy.into(), asked);
            asked = Some(streams.end(Stream::FromHost));
        }
        if self.gather.0 <= 0.0 {
            return asked.filter(|_| copied);
        }
        streams.issue(Stream::Data, self.gather.into(), asked);
        // What is waited for is the longer of both.
        let stream = match copy > self.gather {
            true => Stream::FromHost,
            false => Stream::Data,
        };
        Some(End {
            at: streams.free(Stream::Data),
            stream,
        })
    }
}

impl TrafficPlan {
    fn gathers(&self, kind: ActionKind) -> When {
        match kind {
            ActionKind::F => self.gather_forward,
            ActionKind::B | ActionKind::I => self.gather_backward,
            _ => When::Never,
        }
    }

    fn reduces(&self, kind: ActionKind) -> When {
        match kind {
            ActionKind::B | ActionKind::I => self.reduce,
            _ => When::Never,
        }
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
