//! Ring attention: a rank attends to the keys and values of one rank after another.

use std::ops::Range;

use catalog::Axis;
use catalog::runtime::Rewrite;
use dtensor::{Collective, CollectiveKind};

use super::{Beside, Order, Ring};
use crate::launches::Queue;
use crate::streams::Stream;

impl Order<'_> {
    /// Issues the steps and messages of ring attention. `steps` are those of its kernels that this pass runs.
    pub(super) fn issue_ring(&self, ring: &Ring, steps: &[usize], queue: &mut Queue) {
        match (ring.gather, ring.exchange) {
            (None, Some(message)) => self.passed_round(message, steps, queue),
            (gather, gradients) => self.gathered(gather, gradients, steps, queue),
        }
    }

    /// Issues the steps of ring attention, each while the next block of keys and values arrives.
    fn passed_round(&self, message: usize, steps: &[usize], queue: &mut Queue) {
        let blocks = self.key.layout.cp;
        let arriving = blocks as usize - 1;
        // All steps from the second on are alike: they are issued as one repeated round.
        for block in 0..arriving.min(2) {
            let before = queue.len();
            let arrival = queue.send(message, blocks - 1, Stream::Context);
            for &step in steps {
                queue.compute(step, blocks);
            }
            if block == 1 {
                queue.again(queue.len() - before, arriving - 2);
            }
            queue.wait(arrival);
        }
        for &step in steps {
            queue.compute(step, blocks);
        }
    }

    /// Issues the steps of ring attention over keys and values that one gather brings: the first, over the rank's own, runs meanwhile. The
    /// gradients of each block are sent while the next step runs.
    fn gathered(
        &self,
        gather: Option<usize>,
        gradients: Option<usize>,
        steps: &[usize],
        queue: &mut Queue,
    ) {
        let blocks = self.key.layout.cp;
        let arrival = gather.map(|gather| queue.send(gather, 1, Stream::Context));
        let attend = |queue: &mut Queue| {
            for &step in steps {
                queue.compute(step, blocks);
            }
        };
        attend(queue);
        if let Some(arrival) = arrival {
            queue.wait(arrival);
        }
        let others = blocks as usize - 1;
        // All steps from the second on are alike: they are issued as one repeated round.
        for block in 0..others.min(2) {
            let before = queue.len();
            let sent = gradients.map(|message| queue.send(message, blocks, Stream::Context));
            attend(queue);
            if block == 1 {
                queue.again(queue.len() - before, others - 2);
            }
            if let Some(sent) = sent {
                queue.wait(sent);
            }
        }
        if let Some(message) = gradients {
            let last = queue.send(message, blocks, Stream::Context);
            queue.wait(last);
        }
    }

    /// Whether a message brings keys and values to ring attention, or takes their gradients away.
    pub(super) fn is_of_ring(&self, collective: Collective) -> bool {
        match collective.kind {
            CollectiveKind::RingExchange => true,
            CollectiveKind::AllGather => {
                collective.axis == Axis::Cp && self.lowering.has(Rewrite::RingInPytorch)
            }
            _ => false,
        }
    }

    /// The core-attention kernels that use a ring exchange's keys and values: those after it in forward, before it in
    /// backward.
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
    /// The ring attention that a kernel belongs to.
    pub(super) fn ring(&self, kernel: usize) -> Option<&Ring> {
        let is = |ring: &&Ring| {
            [ring.gather, ring.exchange].contains(&Some(kernel)) || ring.steps.contains(&kernel)
        };
        self.rings.iter().find(is)
    }

    /// Adds a message to the ring attention that runs in these steps.
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
