//! One step of a rank: runs its actions in order.

use std::time::Instant;

use cpu_device::FirstNonFinite;
use plans::{Action, ActionKind};

use super::member::{Captured, Rank};
use crate::device::Device;
use crate::error::ExecutorError;
use crate::report::StepReport;
use crate::settings::Execution;

impl<D: Device> Rank<'_, D> {
    /// Runs one step.
    pub(crate) fn step(&mut self, step: u64) -> Result<StepReport, ExecutorError> {
        self.world.barrier(self.comm)?;
        let start = Instant::now();
        let settings = &self.job.settings;
        let numbers = settings.optimizer.numbers(step, settings.steps);
        self.device.set_numbers(&numbers)?;
        let _ = self.device.take_peak();
        if settings.execution == Execution::Graph && self.has_run {
            self.step_captured(step)?;
        } else {
            self.step_by_action(step)?;
        }
        self.has_run = true;
        self.count_memory();
        let seconds = start.elapsed().as_secs_f64();
        self.report.step_times.push(seconds);
        let last = |values: &[f64]| values.last().copied().unwrap_or(f64::NAN);
        Ok(StepReport {
            step,
            loss: last(&self.report.losses),
            gradient_norm: last(&self.report.gradient_norms),
            seconds,
            peak_memory: self.report.memory.map(|memory| memory.peak),
        })
    }

    fn step_by_action(&mut self, step: u64) -> Result<(), ExecutorError> {
        let actions = self.actions;
        let mut peak_saved = 0;
        self.device.mark()?;
        for (index, &action) in actions.iter().enumerate() {
            self.stages.prefetch(&self.device, index)?;
            self.device.mark()?;
            self.act(action, step)?;
            self.device.mark()?;
            peak_saved = peak_saved.max(self.stages.saved_bytes());
        }
        let routed = self.stages.take_routed();
        if peak_saved > self.report.peak_saved {
            self.report.peak_saved = peak_saved;
            self.report.routed = routed;
        }
        if self.world.size() == 1 {
            self.conclude(step)?;
        }
        self.report.events = self.events(&self.device.laps()?);
        Ok(())
    }

    /// Runs the passes of a step again to find the first operator whose output is not finite. The weights are
    /// unchanged; the gradients are discarded.
    pub(super) fn name_non_finite(&mut self, step: u64) -> Result<(), ExecutorError> {
        self.captured = Captured::<D>::default();
        self.device.set_watch(&FirstNonFinite);
        for &action in self.actions.iter().filter(|a| a.kind != ActionKind::Optim) {
            self.act(action, step)?;
        }
        self.world.barrier(self.comm)?;
        Ok(())
    }

    pub(super) fn act(&mut self, a: Action, step: u64) -> Result<(), ExecutorError> {
        if a.kind == ActionKind::Optim {
            return self.optimize(step);
        }
        if !a.kind.is_pass() {
            return self.stages.exchange(&self.device, a);
        }
        let (ids, labels) = self.tokens(a.micro_batch, step);
        let batch = self.micro_batch(a.micro_batch, step, &ids, &labels);
        let batch = self.device.batch(a.micro_batch, batch)?;
        self.stages.pass(&self.device, a, &batch)
    }
}
