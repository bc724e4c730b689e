//! Forward and backward of a micro-batch on a rank, and what goes to and comes from the neighbouring stages.

use cpu_device::MicroBatch;
use dtensor::block::Half;
use plans::{Action, ActionKind};

use super::member::Rank;
use crate::device::Device;
use crate::error::ExecutorError;
use crate::stage::Backward;

impl<D: Device> Rank<'_, D> {
    pub(super) fn send(&mut self, a: Action) -> Result<(), ExecutorError> {
        let (backward, to) = match a.kind {
            ActionKind::SendF => (false, a.stage + 1),
            _ => (true, a.stage - 1),
        };
        if let Some(x) = self.waiting.remove(&(backward, to, a.micro_batch)) {
            let peer = self.neighbour(to);
            let parcel = self.device.parcel(&x)?;
            let channel = Self::channel(a);
            let sending = self.device.send(peer, channel, "pipeline", &parcel)?;
            self.sending.insert(a, sending);
        }
        Ok(())
    }

    pub(super) fn receive(&mut self, a: Action) -> Result<(), ExecutorError> {
        let (backward, from) = match a.kind {
            ActionKind::RecvF => (false, a.stage - 1),
            _ => (true, a.stage + 1),
        };
        let peer = self.neighbour(from);
        let of = (self.hidden.clone(), self.job.dtype());
        let x = self
            .device
            .receive(peer, Self::channel(a), "pipeline", of)?;
        self.waiting.insert((backward, a.stage, a.micro_batch), x);
        for arrived in self.arrived.get(&a).into_iter().flatten() {
            if let Some(sending) = self.sending.remove(arrived) {
                self.device.sent(sending)?;
            }
        }
        Ok(())
    }

    pub(super) fn forward(&mut self, a: Action, step: u64) -> Result<(), ExecutorError> {
        let input = self.waiting.remove(&(false, a.stage, a.micro_batch));
        let (ids, labels) = self.tokens(a.micro_batch, step);
        let batch = self.micro_batch(a.micro_batch, step, &ids, &labels);
        let batch = self.device.batch(a.micro_batch, batch)?;
        let last = self.last_stage();
        let (stage, device) = self.stage(a.stage);
        let output = stage.forward(device, &batch, a.micro_batch, input)?;
        if a.stage < last {
            self.waiting
                .insert((false, a.stage + 1, a.micro_batch), output);
        } else if self.place.tp == 0 {
            self.keep_losses(a.micro_batch, &output)?;
        }
        Ok(())
    }

    /// Puts the losses of a micro-batch's tokens where those of the step lie.
    fn keep_losses(&mut self, micro_batch: u32, losses: &D::Tensor) -> Result<(), ExecutorError> {
        let tokens: usize = D::shape(losses).iter().product();
        let all = tokens * self.job.strategy.num_micro_batches as usize;
        let kept = match self.losses.take() {
            Some(kept) => kept,
            None => self.device.zeros(all)?,
        };
        let kept = self.losses.insert(kept);
        self.device
            .put_tensor(kept, micro_batch as usize * tokens, losses)
    }

    /// `last`: no backward of this stage comes after it in this step.
    pub(super) fn backward(
        &mut self,
        a: Action,
        step: u64,
        last: bool,
    ) -> Result<(), ExecutorError> {
        let half = match a.kind {
            ActionKind::I => Half::Input,
            ActionKind::W => Half::Weight,
            _ => Half::Both,
        };
        let strategy = &self.job.strategy;
        let pass = Backward {
            half,
            reduces: strategy.overlap.grad_reduce
                && half != Half::Input
                && (last || strategy.zero >= catalog::Zero::Z2),
        };
        let last = self.last_stage();
        let gradient = match half {
            Half::Weight => None,
            _ if a.stage == last => None,
            _ => self.waiting.remove(&(true, a.stage, a.micro_batch)),
        };
        let (ids, labels) = self.tokens(a.micro_batch, step);
        let batch = self.micro_batch(a.micro_batch, step, &ids, &labels);
        let batch = self.device.batch(a.micro_batch, batch)?;
        let (stage, device) = self.stage(a.stage);
        let gradient = stage.backward(device, &batch, a.micro_batch, gradient, pass)?;
        if let Some(gradient) = gradient.filter(|_| a.stage > 0) {
            self.waiting
                .insert((true, a.stage - 1, a.micro_batch), gradient);
        }
        Ok(())
    }

    fn first_sequence(&self, micro_batch: u32) -> u64 {
        let s = &self.job.strategy;
        let replica = self.place.dp_replicate * s.dp_shard + self.place.dp_shard;
        (replica * s.num_micro_batches + u64::from(micro_batch)) * s.micro_batch
    }

    pub(super) fn micro_batch<'d>(
        &self,
        micro_batch: u32,
        step: u64,
        ids: &'d [u32],
        labels: &'d [u32],
    ) -> MicroBatch<'d> {
        let tokens = self.job.global_batch * self.job.seq_len;
        MicroBatch {
            ids,
            labels,
            first_sequence: self.first_sequence(micro_batch),
            seq_len: self.job.seq_len,
            step: step as u32,
            loss_scale: 1.0 / tokens as f32,
        }
    }

    /// Tokens and labels of this rank's part of a micro-batch.
    pub(super) fn tokens(&self, micro_batch: u32, step: u64) -> (Vec<u32>, Vec<u32>) {
        let (job, data) = (self.job, &self.job.data);
        let placements =
            dtensor::Placements::REPLICATE.with(catalog::Axis::Cp, dtensor::Placement::Shard(1));
        let global = [job.strategy.micro_batch, job.seq_len];
        let positions = self.position.indices(&global, &placements, 1);
        let first = step * job.global_batch + self.first_sequence(micro_batch);
        let places = (first..first + job.strategy.micro_batch).flat_map(|sequence| {
            let start = data.start(job.settings.seed, sequence, job.seq_len);
            positions.iter().map(move |&p| start + p as usize)
        });
        places
            .map(|at| (data.token(at), data.token(at + 1)))
            .unzip()
    }
}
