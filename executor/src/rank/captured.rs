//! Steps that a device captures once and then runs by one call each, and the memory of a step.

use super::Rank;
use crate::device::Device;
use crate::error::ExecutorError;
use crate::job::Job;
use crate::report::MemoryUse;
use crate::settings::Execution;

/// Refuses captured steps where the host has a part in every step.
pub(super) fn check<D: Device>(job: &Job, watched: bool) -> Result<(), ExecutorError> {
    let refused = |reason| Err(ExecutorError::Capture { reason });
    match job.settings.execution {
        Execution::Replayed | Execution::Eager => Ok(()),
        Execution::Graph if !D::CAPTURES => refused("the cpu device queues no work"),
        Execution::Graph if watched => refused("--break-at reads every operator"),
        Execution::Graph if job.strategy.world() > 1 => {
            refused("ranks send each other losses and norms through the host")
        }
        Execution::Graph => Ok(()),
    }
}

impl<D: Device> Rank<'_, D> {
    /// Writes what differs from step to step where captured work reads it, and runs that. It is captured the
    /// first time: the step before has made everything that stays.
    pub(super) fn step_captured(&mut self, step: u64) -> Result<(), ExecutorError> {
        for micro_batch in 0..self.job.strategy.num_micro_batches as u32 {
            let (ids, labels) = self.tokens(micro_batch, step);
            let batch = self.micro_batch(micro_batch, step, &ids, &labels);
            self.device.batch(micro_batch, batch)?;
        }
        let captured = match self.captured.take() {
            Some(captured) => captured,
            None => self.capture(step)?,
        };
        self.device.replay(&captured)?;
        self.captured = Some(captured);
        self.report.events.clear();
        self.conclude(step)?;
        Ok(())
    }

    fn capture(&mut self, step: u64) -> Result<D::Captured, ExecutorError> {
        let last_backward = self.last_backward();
        self.device.begin_capture()?;
        let mut actions = self.actions.iter();
        let queued = actions.try_for_each(|&action| self.act(action, step, &last_backward));
        // Recording must end also where queueing failed, and its failure is the cause of the other.
        let captured = self.device.end_capture();
        queued?;
        self.take_routed();
        captured
    }

    /// Keeps what the step used of the device's memory, if no step before used more.
    pub(super) fn count_memory(&mut self) {
        let used = self.device.take_peak();
        let most = |memory: &MemoryUse| memory.peak;
        self.report.memory = used.into_iter().chain(self.report.memory).max_by_key(most);
    }
}
