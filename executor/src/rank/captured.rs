//! Steps that a device captures once and then runs by one call each, and the memory of a step.

use plans::ActionKind;

use super::member::Rank;
use crate::device::Device;
use crate::error::ExecutorError;
use crate::report::MemoryUse;

/// Places of the captured parts.
const PASSES: usize = 0;
const UPDATE: usize = 1;

impl<D: Device> Rank<'_, D> {
    /// Writes what differs from step to step where captured work reads it, and runs that. It is captured the
    /// first time: the step before has made everything that stays.
    pub(super) fn step_captured(&mut self, step: u64) -> Result<(), ExecutorError> {
        for micro_batch in 0..self.job.strategy.num_micro_batches as u32 {
            let (ids, labels) = self.tokens(micro_batch, step);
            let batch = self.micro_batch(micro_batch, step, &ids, &labels);
            self.device.batch(micro_batch, batch)?;
        }
        self.run(PASSES, |rank| rank.passes(step))?;
        let alone = self.world.size() == 1;
        match alone {
            true => self.conclude(step).map(|_| ())?,
            false => self.clip(step)?,
        }
        self.report.events.clear();
        // Before the passes' there may be the update of the step before.
        self.report
            .captured_times
            .extend(self.device.laps()?.last());
        match alone {
            true => Ok(()),
            false => self.run(UPDATE, Self::update),
        }
    }

    /// Everything up to what only the host knows.
    fn passes(&mut self, step: u64) -> Result<(), ExecutorError> {
        let actions = self.actions;
        for (index, &action) in actions.iter().enumerate() {
            if action.kind == ActionKind::Optim {
                self.measure()?;
            } else {
                self.stages.prefetch(&self.device, index)?;
                self.act(action, step)?;
            }
        }
        if self.world.size() == 1 {
            self.update()?;
        }
        self.stages.take_routed();
        Ok(())
    }

    /// Runs a part of the step by one call, after capturing it if it was not.
    fn run(
        &mut self,
        part: usize,
        queue: impl FnOnce(&mut Self) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        let captured = match self.captured[part].take() {
            Some(captured) => captured,
            None => {
                self.device.begin_capture()?;
                let queued = queue(self);
                // Recording must end also where queueing failed, and its failure is the cause of the other.
                let captured = self.device.end_capture();
                queued?;
                captured?
            }
        };
        self.device.mark()?;
        self.device.replay(&captured)?;
        self.captured[part] = Some(captured);
        self.device.mark()
    }

    /// Keeps what the step used of the device's memory, if no step before used more.
    pub(super) fn count_memory(&mut self) {
        let used = self.device.take_peak();
        let most = |memory: &MemoryUse| memory.peak;
        self.report.memory = used.into_iter().chain(self.report.memory).max_by_key(most);
    }
}
