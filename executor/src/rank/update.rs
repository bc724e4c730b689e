//! The end of a step: tied weights, loss and gradient norm, clipping, the optimizer.

use std::sync::Arc;

use comm::Message;
use cpu_device::ExactSum;

use super::member::{BOUNDS, Rank, TIED};
use crate::device::Device;
use crate::error::ExecutorError;

/// Name of tied weights in errors.
const WHAT: &str = "tied weights";

impl<D: Device> Rank<'_, D> {
    /// Runs the whole end of a step. A single rank does not wait for its device.
    pub(super) fn optimize(&mut self, step: u64) -> Result<(), ExecutorError> {
        self.measure()?;
        if self.world.size() > 1 {
            self.clip(step)?;
        }
        self.update()
    }

    /// Completes all sends and the tied gradients, and computes the squares of the gradients.
    pub(super) fn measure(&mut self) -> Result<(), ExecutorError> {
        self.stages.end_sends(&self.device)?;
        let tied = self.add_tied()?;
        let optimizer = &self.job.settings.optimizer;
        let tp = self.place.tp;
        let last = self.stages.last();
        let measured = self.stages.all.iter().flat_map(|(stage, made)| {
            // The slot is one of the last stage; the same number names another weight in other stages of this rank.
            let skip = tied.filter(|_| *stage == last);
            made.states.measured(tp, skip)
        });
        let measured: Vec<_> = measured.collect();
        let losses = self.stages.losses.as_ref();
        self.device.measure_and_clip(&measured, losses, optimizer)
    }

    /// Sets the clipping factor from the gradient norm over all ranks.
    pub(super) fn clip(&mut self, step: u64) -> Result<(), ExecutorError> {
        let norm = self.conclude(step)?;
        let scale = self.job.settings.optimizer.scale(norm);
        self.device.set_scale(scale)
    }

    /// Runs the optimizer on all stages.
    pub(super) fn update(&mut self) -> Result<(), ExecutorError> {
        self.stages.update(&self.device)
    }

    /// Computes loss and gradient norm over all ranks; returns the norm.
    pub(super) fn conclude(&mut self, step: u64) -> Result<f64, ExecutorError> {
        // Detects a failed rank here; a plain read would wait for it forever.
        self.device.settle("a step")?;
        let mut loss = ExactSum::default();
        if let Some(losses) = &self.stages.losses {
            for &token in self.device.read(losses, 0..D::len(losses))?.iter() {
                loss.add(f64::from(token));
            }
        }
        let mut message = loss.bytes();
        let split = message.len();
        message.extend(self.device.squares()?.bytes());
        let comm = self.comm;
        let message = Arc::new(message);
        let mut loss = ExactSum::default();
        let mut squares = ExactSum::default();
        let arrived = self.world.all_gather(comm, "loss and norm", message)?;
        for part in arrived.wait(comm)? {
            loss.merge(&ExactSum::from_bytes(&part[..split]));
            squares.merge(&ExactSum::from_bytes(&part[split..]));
        }
        let tokens = self.job.global_batch * self.job.seq_len;
        let loss = loss.value() / tokens as f64;
        let norm = squares.value().sqrt();
        for (what, value) in [("the loss", loss), ("the gradient norm", norm)] {
            if !value.is_finite() {
                self.name_non_finite(step)?;
                return Err(ExecutorError::NotFinite { step, what, value });
            }
        }
        self.report.losses.push(loss);
        self.report.gradient_norms.push(norm);
        Ok(norm)
    }

    /// Exchanges and adds the gradients of a weight tied between the first and last stages. Returns its slot in the
    /// last stage if this rank has that stage and another rank has the first.
    fn add_tied(&mut self) -> Result<Option<usize>, ExecutorError> {
        let Some(name) = self.tied_name() else {
            return Ok(None);
        };
        let last = self.stages.last();
        let comm = self.comm;
        let ends = [0, last];
        let mut found = [None, None];
        let mut sending = Vec::new();
        // Send both before receiving either: with V-shaped schedules one rank may hold both ends.
        for (end, &stage) in ends.iter().enumerate() {
            let Some(made) = self.stages.get(stage) else {
                continue;
            };
            let slot = made.states.slots.iter().position(|s| s.name == name);
            let slot = slot.expect("both ends hold the tied weight");
            found[end] = Some(slot);
            let own = made.states.own_gradient(&self.device, slot)?;
            let own = own.filter(|(range, _)| !range.is_empty());
            let bounds = own
                .as_ref()
                .map_or([0, 0], |(range, _)| [range.start as u64, range.end as u64]);
            let bounds: Message = Arc::new(bytemuck::cast_slice(&bounds).to_vec());
            for peer in self.sharers(ends[1 - end]) {
                comm.send(peer, BOUNDS[end], WHAT, Message::clone(&bounds))?;
                if let Some((_, parcel)) = &own {
                    sending.push(self.device.send(peer, TIED[end], WHAT, parcel)?);
                }
            }
        }
        let mut arrived = Vec::new();
        for (end, &stage) in ends.iter().enumerate() {
            let Some(slot) = found[end] else { continue };
            for peer in self.sharers(ends[1 - end]) {
                let bounds = comm.receive(peer, BOUNDS[1 - end], WHAT)?;
                let bounds: Vec<u64> = bytemuck::pod_collect_to_vec(&bounds);
                let (first, len) = (bounds[0] as usize, (bounds[1] - bounds[0]) as usize);
                if len > 0 {
                    let channel = TIED[1 - end];
                    let theirs = self.device.receive_flat(peer, channel, WHAT, len)?;
                    arrived.push((stage, slot, first, theirs));
                }
            }
        }
        // Gradients must not change while they are still being sent.
        for sending in sending {
            self.device.sent(sending)?;
        }
        for (stage, slot, first, theirs) in arrived {
            let states = &mut self.stages.own(stage).states;
            states.add_tied(&self.device, slot, (first, &theirs))?;
        }
        Ok(found[1])
    }
}
