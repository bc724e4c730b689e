//! Ring attention: a rank attends to the keys and values of one rank after another.

use std::ops::Range;

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{Collective, CollectiveKind};

use super::{Beside, Order, Ring};
use crate::launches::Queue;
use crate::streams::Stream;

impl Order<'_> {
    /// Issues the steps of ring attention in a pass, and its messages. `kernels` are the attention kernels that every step runs.
    ///
    /// - Where keys and values go round, each step runs while those of the next step arrive.
    /// - Where one gather brings all keys and values, the first step, which needs only the rank's own, runs meanwhile. In backward each
    ///   later step runs while the gradients of the step before it are sent.
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

    /// Issues all steps of ring attention but one. Each runs while one of `parts` equal parts of `message` is sent, if there is a message.
    fn rounds(&self, message: Option<usize>, parts: u64, kernels: &[usize], queue: &mut Queue) {
        let rounds = self.key.layout.cp as usize - 1;
        // All from the second on are alike: they are issued as one round that is repeated.
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

    /// Whether a message belongs to ring attention: it carries keys and values, or their gradients.
    pub(super) fn is_of_ring(&self, collective: Collective) -> bool {
        match collective.kind {
            CollectiveKind::RingExchange => true,
            CollectiveKind::AllGather => {
                collective.axis == Axis::Cp && self.lowering.has(Rewrite::RingInPytorch)
            }
            _ => false,
        }
    }

    /// The core-attention kernels that a message of ring attention belongs to: in forward those issued after it, in backward those
    /// issued before it.
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
    /// The ring attention that has this kernel or message; `None` if none has it.
    pub(super) fn ring(&self, kernel: usize) -> Option<&Ring> {
        let is = |ring: &&Ring| {
            [ring.gather, ring.exchange].contains(&Some(kernel)) || ring.steps.contains(&kernel)
        };
        self.rings.iter().find(is)
    }

    /// Notes a message, of this kind, of the ring attention whose steps run these kernels.
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
