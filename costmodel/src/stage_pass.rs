//! Runs one forward or backward pass of a pipeline stage on the streams of a GPU.
//!
//! The pass runs its blocks one after the other. Beside their kernels run what the blocks send and copy: gathers of parameters,
//! reductions of gradients, and copies to and from host memory.

use std::ops::Range;

use catalog::{Bytes, Seconds};
use plans::ActionKind;
use plans::legality::MAX_AHEAD;

use crate::activation_copies::ActivationCopies;
use crate::offload::GradientCopies;
use crate::picoseconds::Picoseconds;
use crate::stage::{Awaited, LayerTraffic, Phase, StageWork, TrafficPlan, When};
use crate::streams::{End, Stream, Streams};

/// The largest number of blocks whose parameters are gathered at the same time.
const READY: usize = MAX_AHEAD as usize + 1;

/// A forward or backward pass of a stage over one micro-batch: how long it takes, and how much memory it needs. The default
/// takes and needs nothing.
#[derive(Debug, Default)]
pub(crate) struct StagePass {
    /// Time that its kernels take when nothing runs beside them.
    pub(crate) duration: Picoseconds,
    /// Most bytes that the pass needs at once, beyond those in use when it begins.
    pub(crate) transient: Bytes,
    /// Bytes that stay in use after it, such as activations saved for backward.
    pub(crate) allocates: Bytes,
    /// Bytes in use before it that it frees.
    pub(crate) frees: Bytes,
    /// The micro-batches, by number, whose pass sends and copies nothing.
    pub(crate) alone: Range<u32>,
    forward: bool,
    /// The blocks in the order in which the pass runs them, equal neighbours as one row. Empty if no micro-batch has messages or
    /// copies in this pass.
    rows: Vec<Row>,
    /// The micro-batches in which the pass gathers parameters.
    gathers: When,
    /// The micro-batches in which the pass reduces gradients.
    reduces: When,
    plan: TrafficPlan,
    activations: ActivationCopies,
}

/// A row of `count` equal blocks. The times are those of one block; gather and reduction are as long as they take while the card also
/// carries the messages of a pass ([`beside`]).
#[derive(Debug)]
struct Row {
    count: u64,
    /// Index of its first block among the layers of the stage; `None` if its blocks are no layers.
    first_layer: Option<u64>,
    kernels: Picoseconds,
    gather: Picoseconds,
    reduce: Picoseconds,
    to_host: GradientCopies,
    from_host: Picoseconds,
    /// Whether copying the parameters from host memory takes longer than gathering them.
    waits_for_copy: bool,
}

impl StagePass {
    /// The stage's pass of this kind.
    pub(crate) fn new(stage: &StageWork, kind: ActionKind) -> Self {
        let Phase {
            work, recompute, ..
        } = stage.phase(kind);
        Self::lasting(stage, kind, (work + recompute).duration().into())
    }

    /// The stage's pass of this kind, if its kernels took `duration`.
    pub(crate) fn lasting(stage: &StageWork, kind: ActionKind, duration: Picoseconds) -> Self {
        let phase = stage.phase(kind);
        let forward = kind == ActionKind::F;
        let [gathers, reduces] = [stage.traffic.gathers(kind), stage.traffic.reduces(kind)];
        let nothing = [gathers, reduces] == [When::Never; 2] && stage.activations.is_none();
        let TrafficPlan {
            awaited,
            reduces_at_end,
            ..
        } = stage.traffic;
        let sends = [
            gathers != When::Never && awaited == Awaited::Own,
            reduces != When::Never && !reduces_at_end,
        ];
        let row = |row: &LayerTraffic| Row::new(row, forward, duration, sends);
        let rows = stage.layers.iter();
        let mut pass = Self {
            duration,
            transient: phase.transient,
            allocates: phase.allocates,
            frees: phase.frees,
            alone: 0..0,
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
        };
        pass.alone = pass.never();
        pass
    }

    /// Runs the pass of one micro-batch, block by block.
    ///
    /// A block starts when its parameters are gathered. Their gather is issued when the block before starts (FSDP's prefetch,
    /// Megatron's bucket look-ahead), or as many blocks earlier as the plan says. In backward a block's gradients are reduced when
    /// the block ends. If parameters are gathered only once per step, all gathers are issued at its start.
    ///
    /// The first block may wait for all gathers, and reductions may follow the last block.
    ///
    /// Gathers and reductions use the same links, so they run one after the other on a single stream.
    #[inline(never)]
    pub(crate) fn run(&self, streams: &mut Streams, micro_batch: u32) {
        let gathers = self.plan.applies(self.gathers, micro_batch);
        let reduces = self.plan.applies(self.reduces, micro_batch);
        let copies = !self.activations.is_none();
        if self.rows.is_empty() || !(gathers || reduces || copies) {
            streams.issue(Stream::Compute, self.duration, None);
            return;
        }
        let awaits_all = self.plan.awaited != Awaited::Own;
        if gathers && awaits_all {
            self.gather_all(streams);
        }
        let mut asked = Asked {
            rows: if gathers && !awaits_all {
                &self.rows
            } else {
                &[]
            },
            passed: 0,
            at_once: self.plan.gather_forward == When::First,
        };
        let ahead = match self.forward {
            true => self.plan.ahead.forward,
            false => self.plan.ahead.backward,
        };
        let ahead = (ahead as usize).min(READY - 1);
        // A ring of `ahead + 1` places: when the parameters of each block that was asked for are there. The next block's place is
        // `slot`, and those of the blocks after it follow.
        let mut ready = [None; READY];
        for ready in &mut ready[..ahead] {
            *ready = asked.next(streams);
        }
        let mut slot = 0;
        let mut copying = self.activations.begin();
        for row in &self.rows {
            let reduction = self.reduction(row, micro_batch);
            for block in 0..row.count {
                let last = if slot == 0 { ahead } else { slot - 1 };
                ready[last] = asked.next(streams);
                let layer = row.layer(block, self.forward).filter(|_| copies);
                if let Some(layer) = layer.filter(|_| !self.forward) {
                    copying.before_backward(layer, streams);
                }
                streams.issue(Stream::Compute, row.kernels, ready[slot]);
                if let Some(layer) = layer.filter(|_| self.forward) {
                    copying.after_forward(layer, streams);
                }
                if reduces && !self.plan.reduces_at_end {
                    reduction.issue(streams);
                }
                slot = if slot == ahead { 0 } else { slot + 1 };
            }
        }
        if reduces {
            self.end_reductions(streams, micro_batch);
        }
    }

    /// Gathers the parameters of all blocks, for which the pass waits.
    fn gather_all(&self, streams: &mut Streams) {
        let at_once = self.plan.awaited == Awaited::AllOfStep;
        for row in self.blocks() {
            row.gather(at_once, streams);
        }
        streams.join(Stream::Data);
    }

    /// Ends the reductions of a pass: gradients that are not reduced block by block are reduced now. If the system waits for
    /// reductions, the kernels that follow begin only when they are done.
    fn end_reductions(&self, streams: &mut Streams, micro_batch: u32) {
        if self.plan.reduces_at_end {
            self.blocks()
                .for_each(|row| self.reduction(row, micro_batch).issue(streams));
        }
        if self.plan.reductions_hold_kernels {
            streams.join(Stream::Data);
        }
    }

    /// How the gradients of a row's block are reduced in this micro-batch.
    fn reduction(&self, row: &Row, micro_batch: u32) -> Reduction {
        Reduction {
            time: row.reduce,
            to_host: self.plan.copied(row.to_host, micro_batch).into(),
            waits: self.plan.waits_for_copies(micro_batch),
        }
    }

    /// The rows of all blocks in the order of the pass, a row once for each of its blocks.
    fn blocks(&self) -> impl Iterator<Item = &Row> {
        let rows = self.rows.iter();
        rows.flat_map(|row| std::iter::repeat_n(row, row.count as usize))
    }

    /// The micro-batches whose pass sends and copies nothing: none, all, or all but the first or
    /// the last, if only these have messages.
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

/// The blocks of a pass whose gathers are not issued yet.
struct Asked<'a> {
    rows: &'a [Row],
    /// Number of blocks of the first of these rows whose gathers are issued.
    passed: u64,
    /// Whether all gathers are issued at the start of the pass, not each when its block is near.
    at_once: bool,
}

impl Asked<'_> {
    /// Issues the next block's gather, and returns when its parameters are there. `None` if nothing is gathered for the block, or
    /// if no block is left.
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

/// The reduction of a block's gradients in one micro-batch, and their copies if they belong in host memory.
#[derive(Clone, Copy)]
struct Reduction {
    time: Picoseconds,
    to_host: Picoseconds,
    /// Whether kernels wait for the copies.
    waits: bool,
}

impl Reduction {
    #[inline(always)]
    fn issue(self, streams: &mut Streams) {
        let mut done = streams.end(Stream::Compute);
        if self.time > Picoseconds::ZERO {
            streams.issue(Stream::Data, self.time, Some(done));
            done = streams.end(Stream::Data);
        }
        if self.to_host > Picoseconds::ZERO {
            streams.issue(Stream::ToHost, self.to_host, Some(done));
            if self.waits {
                streams.join(Stream::ToHost);
            }
        }
    }
}

impl Row {
    /// The row in a pass that lasts `duration`. Whether its gathers and its reductions run beside kernels is in `sends`.
    fn new(row: &LayerTraffic, forward: bool, duration: Picoseconds, sends: [bool; 2]) -> Self {
        let (share, card) = match forward {
            true => (row.forward_share, row.forward_card),
            false => (row.backward_share, row.backward_card),
        };
        let (gather, from_host) = match row.stays_gathered && !forward {
            true => (Seconds(0.0), Picoseconds::ZERO),
            false => (row.gather, row.copies.from_host.into()),
        };
        let kernels = duration.share(share);
        let sent = gather * f64::from(sends[0]) + row.reduce * f64::from(sends[1]);
        let longer = beside(sent, kernels.into(), card);
        Self {
            count: row.count,
            first_layer: row.first_layer,
            kernels,
            gather: (gather * longer).into(),
            reduce: (row.reduce * longer).into(),
            to_host: row.copies.to_host,
            from_host,
            waits_for_copy: row.copies.from_host > row.gather,
        }
    }

    /// The number of a block among the layers of the stage, if it is a layer; `block` counts from 0 in the order of the pass.
    fn layer(&self, block: u64, forward: bool) -> Option<u64> {
        let offset = match forward {
            true => block,
            false => self.count - 1 - block,
        };
        self.first_layer.map(|first| first + offset)
    }

    /// Issues the copy of a block's parameters from host memory, if they lie there, and then their gather. Both wait for the
    /// kernels issued so far, but not if `at_once`. Returns when the parameters are there; `None` if there is nothing to wait for.
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
        // The kernels wait for both; the time counts as that of the longer.
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

/// The factor, at least 1, by which data-parallel messages of a block take longer because the network card also carries messages of the
/// pass, which occupy it for `card` while the block's kernels run for `kernels`. Messages of the pass go first. The card carries one
/// message after the other, so both kinds together take as long as it needs for both.
fn beside(messages: Seconds, kernels: Seconds, card: Seconds) -> f64 {
    if card.0 <= 0.0 || messages.0 <= 0.0 {
        return 1.0;
    }
    let free = (kernels - card).max(Seconds(0.0));
    // Messages that are over before the kernels are meet a part of the pass's messages only.
    1.0 + (card.0 / messages.0).min(card.0 / free.0)
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::offload::Copies;
    use crate::streams::Slowdown;

    /// Three blocks, each with kernels of 2 s in each pass, a gather of 1 s and a reduction of 1 s. Kernels beside them are slowed to
    /// two thirds of their speed, and messages of each block use the card for `card`. The times at which kernels and messages of a
    /// pass end.
    fn ends(whole: bool, kind: ActionKind, card: Seconds) -> [f64; 2] {
        let share = 1.0 / 3.0;
        let row = LayerTraffic {
            count: 3,
            first_layer: None,
            forward_share: share,
            backward_share: share,
            gather: Seconds(1.0),
            stays_gathered: false,
            reduce: Seconds(1.0),
            copies: Copies::default(),
            forward_card: card,
            backward_card: card,
        };
        let stage = StageWork {
            layers: vec![row],
            traffic: TrafficPlan {
                gather_forward: When::First,
                reduce: When::Last,
                awaited: if whole {
                    Awaited::AllOfPass
                } else {
                    Awaited::Own
                },
                reduces_at_end: whole,
                ..TrafficPlan::default()
            },
            ..StageWork::default()
        };
        let mut streams = Streams::new(Slowdown::all(1.5));
        StagePass::lasting(&stage, kind, Seconds(6.0).into()).run(&mut streams, 0);
        [Stream::Compute, Stream::Data].map(|stream| Seconds::from(streams.free(stream)).0)
    }

    const NONE: Seconds = Seconds(0.0);

    #[test]
    fn a_card_carries_the_messages_of_a_pass_before_others() {
        // A gather runs beside 2 s of kernels, of which the card is busy for 1 s: it takes 2 s instead of 1 s.
        assert_eq!(ends(false, ActionKind::F, Seconds(1.0))[1], 6.0);
        // So do reductions, the last of which nothing hides.
        assert_eq!(ends(false, ActionKind::B, Seconds(1.0))[1], 10.0);
        // Messages that come all at once meet no other ones.
        assert_eq!(ends(true, ActionKind::B, Seconds(1.0)), [6.0, 9.0]);
        let beside = |messages, card| beside(Seconds(messages), Seconds(2.0), Seconds(card));
        assert_eq!(
            [beside(0.5, 1.5), beside(4.0, 1.5), beside(4.0, 2.0)],
            [4.0, 1.375, 1.5]
        );
    }

    #[test]
    fn nothing_hides_the_messages_of_a_stage_with_one_bucket() {
        // The third gather is issued after the first kernel, so only one gather slows that kernel.
        assert_eq!(ends(false, ActionKind::F, NONE), [7.5, 3.0]);
        assert_eq!(ends(true, ActionKind::F, NONE), [9.0, 3.0]);
        assert_eq!(ends(false, ActionKind::B, NONE), [7.0, 8.0]);
        assert_eq!(ends(true, ActionKind::B, NONE), [6.0, 9.0]);
    }
}
