//! A pass of a stage on the streams of its GPU: its kernels block by block, with data-parallel messages and copies beside
//! them.

use std::ops::Range;

use catalog::Bytes;
use plans::ActionKind;
use plans::legality::MAX_AHEAD;

use crate::activation_copies::ActivationCopies;
use crate::picoseconds::Picoseconds;
use crate::stage::{LayerTraffic, Phase, StageWork, TrafficPlan, When};
use crate::streams::{End, Stream, Streams};

/// Most blocks that are gathered at one time.
const READY: usize = MAX_AHEAD as usize + 1;

/// Time and memory of a pass of a stage.
#[derive(Debug, Default)]
pub(crate) struct StagePass {
    /// Time of its kernels.
    pub(crate) duration: Picoseconds,
    /// Peak bytes during the pass beyond what is held.
    pub(crate) transient: Bytes,
    /// Bytes held from its end on.
    pub(crate) allocates: Bytes,
    /// Bytes released at its end.
    pub(crate) frees: Bytes,
    /// Micro-batches for which nothing runs beside its kernels.
    pub(crate) alone: Range<u32>,
    beside: Beside,
}

/// What runs beside the kernels of a pass.
#[derive(Debug, Default)]
struct Beside {
    forward: bool,
    /// Rows of equal blocks in the order of the pass; none if nothing ever runs beside its kernels.
    rows: Vec<Row>,
    gathers: When,
    reduces: When,
    plan: TrafficPlan,
    activations: ActivationCopies,
}

/// A row of equal blocks, with the times of one of them.
#[derive(Debug)]
struct Row {
    count: u64,
    first_layer: Option<u64>,
    kernels: Picoseconds,
    gather: Picoseconds,
    reduce: Picoseconds,
    to_host: Picoseconds,
    from_host: Picoseconds,
    /// Whether its parameters are copied from host memory for longer than they are gathered.
    waits_for_copy: bool,
}

impl StagePass {
    /// The pass of a kind.
    pub(crate) fn new(stage: &StageWork, kind: ActionKind) -> Self {
        let Phase {
            work, recompute, ..
        } = stage.phase(kind);
        Self::lasting(stage, kind, (work + recompute).duration().into())
    }

    /// The pass of a kind, with kernels that take `duration`.
    pub(crate) fn lasting(stage: &StageWork, kind: ActionKind, duration: Picoseconds) -> Self {
        let phase = stage.phase(kind);
        let beside = Beside::of(stage, kind, duration);
        Self {
            duration,
            transient: phase.transient,
            allocates: phase.allocates,
            frees: phase.frees,
            alone: beside.never(),
            beside,
        }
    }

    /// Runs the kernels of a micro-batch with what runs beside them, block by block.
    ///
    /// A gather is issued when the block before it begins (FSDP's prefetch, Megatron's bucket look-ahead), or as many blocks
    /// ahead as the plan says, and so goes ahead of that block's reduction, which is issued when it ends; a block waits for
    /// its parameters. Parameters gathered once per step are requested when the optimizer is done, in turn for all stages.
    /// All traffic shares one stream, because it shares the links.
    #[inline(never)]
    pub(crate) fn run(&self, streams: &mut Streams, micro_batch: u32) {
        let of = &self.beside;
        let gathers = of.plan.applies(of.gathers, micro_batch);
        let reduces = of.plan.applies(of.reduces, micro_batch);
        let copies = !of.activations.is_none();
        if of.rows.is_empty() || !(gathers || reduces || copies) {
            streams.issue(Stream::Compute, self.duration, None);
            return;
        }
        let waits = of.plan.accumulation_waits && micro_batch > of.plan.first;
        let mut asked = Asked {
            rows: if gathers { &of.rows } else { &[] },
            passed: 0,
            at_once: of.plan.gather_forward == When::First,
        };
        let ahead = match of.forward {
            true => of.plan.ahead.forward,
            false => of.plan.ahead.backward,
        };
        let ahead = (ahead as usize).min(READY - 1);
        // When the parameters of the blocks that are gathered are there: of the next block at `slot`, of those after it in the
        // places that follow, around the first `ahead + 1`.
        let mut ready = [None; READY];
        for ready in &mut ready[..ahead] {
            *ready = asked.next(streams);
        }
        let mut slot = 0;
        let mut copying = of.activations.begin();
        for row in &of.rows {
            for block in 0..row.count {
                let last = if slot == 0 { ahead } else { slot - 1 };
                ready[last] = asked.next(streams);
                let layer = row.first_layer.filter(|_| copies).map(|first| {
                    first
                        + if of.forward {
                            block
                        } else {
                            row.count - 1 - block
                        }
                });
                if let Some(layer) = layer.filter(|_| !of.forward) {
                    copying.before_backward(layer, streams);
                }
                streams.issue(Stream::Compute, row.kernels, ready[slot]);
                if let Some(layer) = layer.filter(|_| of.forward) {
                    copying.after_forward(layer, streams);
                }
                if reduces {
                    row.reduce(waits, streams);
                }
                slot = if slot == ahead { 0 } else { slot + 1 };
            }
        }
    }
}

impl Beside {
    fn of(stage: &StageWork, kind: ActionKind, duration: Picoseconds) -> Self {
        let forward = kind == ActionKind::F;
        let [gathers, reduces] = [stage.traffic.gathers(kind), stage.traffic.reduces(kind)];
        let nothing = [gathers, reduces] == [When::Never; 2] && stage.activations.is_none();
        let row = |row: &LayerTraffic| Row::new(row, forward, duration);
        let rows = stage.layers.iter();
        Self {
            forward,
            rows: match forward {
                _ if nothing => Vec::new(),
                true => rows.map(row).collect(),
                false => rows.rev().map(row).collect(),
            },
            gathers,
            reduces,
            plan: stage.traffic,
            activations: stage.activations,
        }
    }

    /// Micro-batches, between the step's first and last, of which nothing runs beside the kernels.
    fn never(&self) -> Range<u32> {
        let when = [self.gathers, self.reduces];
        if when.contains(&When::Always) || !self.activations.is_none() {
            return 0..0;
        }
        let TrafficPlan { first, last, .. } = self.plan;
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
}

/// The blocks of a pass whose parameters are still to be gathered.
struct Asked<'a> {
    rows: &'a [Row],
    /// Number of blocks of the first row that were passed.
    passed: u64,
    at_once: bool,
}

impl Asked<'_> {
    /// Gathers the parameters of the next block. Returns when they are there; `None` if they always are, or no block is left.
    #[inline(always)]
    fn next(&mut self, streams: &mut Streams) -> Option<End> {
        let row = self.rows.first()?;
        self.passed += 1;
        if self.passed == row.count {
            self.passed = 0;
            self.rows = &self.rows[1..];
        }
        row.gather(self.at_once, streams)
    }
}

impl Row {
    fn new(row: &LayerTraffic, forward: bool, duration: Picoseconds) -> Self {
        let share = match forward {
            true => row.forward_share,
            false => row.backward_share,
        };
        Self {
            count: row.count,
            first_layer: row.first_layer,
            kernels: duration.share(share),
            gather: row.gather.into(),
            reduce: row.reduce.into(),
            to_host: row.copies.to_host.into(),
            from_host: row.copies.from_host.into(),
            waits_for_copy: row.copies.from_host > row.gather,
        }
    }

    /// Reduces a block's gradients, and copies them to host memory if they go there; compute `waits` for the copy.
    #[inline(always)]
    fn reduce(&self, waits: bool, streams: &mut Streams) {
        let mut done = streams.end(Stream::Compute);
        if self.reduce > Picoseconds::ZERO {
            streams.issue(Stream::Data, self.reduce, Some(done));
            done = streams.end(Stream::Data);
        }
        if self.to_host > Picoseconds::ZERO {
            streams.issue(Stream::ToHost, self.to_host, Some(done));
            if waits {
                streams.join(Stream::ToHost);
            }
        }
    }

    /// Copies a block's parameters from host memory, if they lie there, and gathers them, `at_once` or when compute has come as
    /// far as it has been issued. Returns when they are there; `None` if they always are.
    #[inline(always)]
    fn gather(&self, at_once: bool, streams: &mut Streams) -> Option<End> {
        let mut asked = (!at_once).then(|| streams.end(Stream::Compute));
        let copied = self.from_host > Picoseconds::ZERO;
        if copied {
            streams.issue(Stream::FromHost, self.from_host, asked);
            asked = Some(streams.end(Stream::FromHost));
        }
        if self.gather == Picoseconds::ZERO {
            return asked.filter(|_| copied);
        }
        streams.issue(Stream::Data, self.gather, asked);
        // What is waited for is the longer of both.
        let stream = match self.waits_for_copy {
            true => Stream::FromHost,
            false => Stream::Data,
        };
        Some(End {
            at: streams.free(Stream::Data),
            stream,
        })
    }
}
