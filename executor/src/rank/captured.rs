//! Steps that a device captures once and then replays by single calls, and the memory that a step uses.

use plans::ActionKind;

use super::member::Rank;
use crate::device::Device;
use crate::error::ExecutorError;
use crate::report::MemoryUse;

/// Indices of the captured parts of a step: passes and norm, and the update.
const PASSES: usize = 0;
const UPDATE: usize = 1;

impl<D: Device> Rank<'_, D> {
    /// Copies the step's inputs to where captured work reads them, and replays it. Captures it the first time; by then
    /// an earlier step has allocated everything that stays.
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
        // If there is an earlier lap, it is that of the last step's update; the passes' is the last.
        self.report
            .captured_times
            .extend(self.device.laps()?.last());
        match alone {
            true => Ok(()),
            false => self.run(UPDATE, Self::update),
        }
    }

    /// Queues everything up to the point where the host is needed.
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

    /// Replays a part of the step, capturing it first if necessary.
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
                // Recording must end even if queueing failed; the error from queueing is the cause and comes first.
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

    /// Records the device memory of this step if it is the highest so far.
    pub(super) fn count_memory(&mut self) {
        let used = self.device.take_peak();
        let most = |memory: &MemoryUse| memory.peak;
        self.report.memory = used.into_iter().chain(self.report.memory).max_by_key(most);
    }
}
