//! Ring attention: a rank attends to the keys and values of one rank after another.

use std::ops::Range;

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{Collective, CollectiveKind};

use super::{Beside, Order, Ring};
use crate::launches::Queue;
use crate::streams::Stream;

impl Order<'_> {
    /// Issues the attention steps and the messages of one pass of ring attention. Every step runs `kernels` over the keys and values of
    /// one rank. There are two ways to bring these to a rank:
    ///
    /// - Ranks pass them on, each to the next: every step runs while the keys and values for the next step arrive.
    /// - An all-gather brings those of all ranks at once. The first step needs only the rank's own, so it runs during the gather. In
    ///   backward, every further step runs while the gradients from the step before are sent.
    pub(super) fn issue_ring(&self, ring: &Ring, kernels: &[usize], queue: &mut Queue) {
        let blocks = self.key.layout.cp;
        let Some(gather) = ring.gather else {
            self.rounds(ring.exchange, blocks - 1, kernels, queue);
            return self.step(kernels, queue);
        };
        let arrival = queue.send(gather, 1, Stream::Context);
        self.step(kernels, queue);
        queue.wait(arrival);
        self.rounds(ring.exchange, blocks, kernels, queue);
        if let Some(gradients) = ring.exchange {
            let last = queue.send(gradients, blocks, Stream::Context);
            queue.wait(last);
        }
    }

    /// Issues one step fewer than there are ranks. If there is a `message`, each step runs while one of its `parts` equal parts is sent, and
    /// the next step waits until that part has arrived.
    fn rounds(&self, message: Option<usize>, parts: u64, kernels: &[usize], queue: &mut Queue) {
        let rounds = self.key.layout.cp as usize - 1;
        // The second and all later rounds are alike, so they are issued as one round that is repeated.
        for round in 0..rounds.min(2) {
            let before = queue.len();
            let sent = message.map(|message| queue.send(message, parts, Stream::Context));
            self.step(kernels, queue);
            if round == 1 {
                queue.again(queue.len() - before, rounds - 2);
            }
            if let Some(sent) = sent {
                queue.wait(sent);
            }
        }
    }

    /// Issues one step of ring attention, over the keys and values of one rank.
    fn step(&self, kernels: &[usize], queue: &mut Queue) {
        for &kernel in kernels {
            queue.compute(kernel, self.key.layout.cp);
        }
    }

    /// Whether a message carries the keys and values of ring attention, or their gradients.
    pub(super) fn is_of_ring(&self, collective: Collective) -> bool {
        match collective.kind {
            CollectiveKind::RingExchange => true,
            CollectiveKind::AllGather => {
                collective.axis == Axis::Cp && self.lowering.has(Rewrite::RingInPytorch)
            }
            _ => false,
        }
    }

    /// The attention kernels for which a message of ring attention is sent. In forward they are the next ones after the message, in backward
    /// the last ones before it. The result is a range of indices into the operations of both passes, those of forward first.
    pub(super) fn attention(&self, message: usize) -> Option<Range<usize>> {
        let forward = self.lowered.forward.len();
        let is = |&kernel: &usize| self.is_attention(kernel);
        if message < forward {
            let start = (message + 1..forward).find(is)?;
            let end = (start..forward)
                .find(|kernel| !is(kernel))
                .unwrap_or(forward);
            return Some(start..end);
        }
        let end = (forward..message).rfind(is)? + 1;
        let start = (forward..end).rfind(|kernel| !is(kernel));
        Some(start.map_or(forward, |before| before + 1)..end)
    }
}

impl Beside {
    /// The ring attention to which an operation belongs, as one of its messages or attention kernels; `None` if it belongs to none.
    /// `operation` is an index into the operations of both passes, those of forward first.
    pub(super) fn ring(&self, operation: usize) -> Option<&Ring> {
        let is = |ring: &&Ring| {
            [ring.gather, ring.exchange].contains(&Some(operation))
                || ring.steps.contains(&operation)
        };
        self.rings.iter().find(is)
    }

    /// Records that a message belongs to the ring attention whose steps run the kernels `steps`. An all-gather is its gather, any other
    /// kind its exchange.
    pub(super) fn add_to_ring(
        &mut self,
        message: usize,
        kind: CollectiveKind,
        steps: Range<usize>,
    ) {
        let known = self.rings.iter().position(|ring| ring.steps == steps);
        let at = known.unwrap_or_else(|| {
            self.rings.push(Ring {
                gather: None,
                exchange: None,
                steps,
            });
            self.rings.len() - 1
        });
        let ring = &mut self.rings[at];
        let place = match kind {
            CollectiveKind::AllGather => &mut ring.gather,
            _ => &mut ring.exchange,
        };
        *place = Some(message);
    }
}
