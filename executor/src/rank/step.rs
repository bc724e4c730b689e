//! One step of a rank: its actions, one after the other.

use std::collections::HashMap;
use std::time::Instant;

use cpu_device::FirstNonFinite;
use plans::{Action, ActionKind};

use super::member::{Captured, Rank};
use crate::device::Device;
use crate::error::ExecutorError;
use crate::report::{Routed, StepReport};
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
        let last_backward = self.last_backward();
        let actions = self.actions;
        let mut peak_saved = 0;
        self.device.mark()?;
        for (index, &action) in actions.iter().enumerate() {
            self.prefetch(action, &actions[index + 1..])?;
            self.device.mark()?;
            self.act(action, step, &last_backward)?;
            self.device.mark()?;
            let saved = self.stages.iter().map(|(_, s)| s.saved_bytes()).sum();
            peak_saved = peak_saved.max(saved);
        }
        let routed = self.take_routed();
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

    pub(super) fn take_routed(&mut self) -> Vec<Routed> {
        let routed = self.stages.iter_mut().flat_map(|(_, s)| s.take_routed());
        routed.collect()
    }

    /// Before a pass, sends the parameters that will be gathered next: they arrive while it runs.
    pub(super) fn prefetch(
        &mut self,
        action: Action,
        later: &[Action],
    ) -> Result<(), ExecutorError> {
        let pass = matches!(
            action.kind,
            ActionKind::F | ActionKind::B | ActionKind::I | ActionKind::W
        );
        let next = later.iter().find(|a| a.kind == ActionKind::Unshard);
        match next.filter(|_| pass) {
            Some(next) => {
                let (stage, device) = self.stage(next.stage);
                stage.states.prefetch(device)
            }
            None => Ok(()),
        }
    }

    /// Micro-batch of every stage's last backward.
    pub(super) fn last_backward(&self) -> HashMap<u32, u32> {
        let backward = |a: &&Action| matches!(a.kind, ActionKind::B | ActionKind::W);
        let done = self.actions.iter().filter(backward);
        done.map(|a| (a.stage, a.micro_batch)).collect()
    }

    /// Runs the passes of a step again, to name the operator that made the first number that is not
    /// finite. Weights are still what they were; gradients are of no use any more.
    pub(super) fn name_non_finite(&mut self, step: u64) -> Result<(), ExecutorError> {
        self.captured = Captured::<D>::default();
        self.device.set_watch(&FirstNonFinite);
        let last_backward = self.last_backward();
        for &action in self.actions.iter().filter(|a| a.kind != ActionKind::Optim) {
            self.act(action, step, &last_backward)?;
        }
        self.world.barrier(self.comm)?;
        Ok(())
    }

    pub(super) fn act(
        &mut self,
        a: Action,
        step: u64,
        last_backward: &HashMap<u32, u32>,
    ) -> Result<(), ExecutorError> {
        match a.kind {
            ActionKind::F => self.forward(a, step),
            ActionKind::B | ActionKind::I | ActionKind::W => {
                let last = last_backward.get(&a.stage) == Some(&a.micro_batch);
                self.backward(a, step, last)
            }
            ActionKind::RecvF | ActionKind::RecvB => self.receive(a),
            ActionKind::SendF | ActionKind::SendB => self.send(a),
            ActionKind::Unshard => {
                let (stage, device) = self.stage(a.stage);
                stage.states.unshard(device)
            }
            ActionKind::Reshard => {
                self.stage(a.stage).0.states.reshard();
                Ok(())
            }
            ActionKind::ReduceGrad => {
                let last = last_backward.get(&a.stage) == Some(&a.micro_batch);
                let comm = self.comm;
                let (stage, device) = self.stage(a.stage);
                stage.states.reduce(device, comm, last)
            }
            ActionKind::Optim => self.optimize(step),
        }
    }
}
