//! What ranks exchange inside a block. It passes through the host, by the cpu device's own exchanges.

use super::{Run, unsupported};
use crate::comm::{pack, unpack};
use crate::cpu::{self, CpuError, Value};
use crate::cuda::error::CudaError;
use crate::cuda::ops::Losses;
use crate::cuda::tensor::Tensor;
use crate::placement::Placement;
use crate::trace::{CollectiveKind, Detail, Op, OpKind, TensorId, View};
use spec::{Axis, DType};

impl Run<'_> {
    pub(super) fn collective(&mut self, op: &Op, kind: CollectiveKind) -> Result<(), CudaError> {
        match op.detail {
            Detail::Redistribute { axis, from, to } => {
                let id = op.inputs[0];
                let mut info = self.info(id).clone();
                info.placements = info.placements.with(axis, from);
                let out = self.through_host(self.tensor(id)?, |host, x| {
                    host.redistribute(&op.scope, &x, &info, (axis, from, to))
                })?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            Detail::VocabularySums { logits } => self.vocabulary_sums(op, logits),
            _ if kind == CollectiveKind::RingExchange => {
                for &id in &op.inputs {
                    self.gather_ring(op, id)?;
                }
                Ok(())
            }
            _ => Err(unsupported(op, "experts on several ranks")),
        }
    }

    /// What the host makes of a tensor.
    fn through_host(
        &self,
        x: &Tensor,
        work: impl FnOnce(&cpu::Machine<'_>, Value) -> Result<Value, CpuError>,
    ) -> Result<Tensor, CudaError> {
        let x = Value::Tensor(self.device().download(x)?);
        match work(&self.machine.host, x)? {
            Value::Tensor(out) => self.device().upload(&out),
            _ => Err(CudaError::Unsupported {
                operator: "an exchange".to_owned(),
                scope: self.block.prefix.clone(),
                reason: "what is no tensor".to_owned(),
            }),
        }
    }

    /// This rank's shard of a tensor that it holds whole.
    pub(super) fn shard(&mut self, view: &View) -> Result<(), CudaError> {
        let [from, to] = [view.from, view.to].map(|id| self.info(id));
        let part = self.through_host(self.tensor(view.from)?, |host, x| match &x {
            Value::Tensor(whole) => Ok(Value::Tensor(host.shard(whole, from, to))),
            _ => Ok(x),
        })?;
        self.set(view.to, part);
        Ok(())
    }

    /// Keys or values of the whole sequence: as they are, or from round the ring.
    pub(super) fn keys(&self, id: TensorId) -> Result<&Tensor, CudaError> {
        match self.ring.get(&self.block.storage(id)) {
            Some(whole) => Ok(whole),
            None => self.tensor(id),
        }
    }

    fn gather_ring(&mut self, op: &Op, id: TensorId) -> Result<(), CudaError> {
        let info = self.info(id);
        let whole = self.through_host(self.tensor(id)?, |host, x| match &x {
            Value::Tensor(part) => Ok(Value::Tensor(host.ring(&op.scope, part, info)?)),
            _ => Ok(x),
        })?;
        self.ring.insert(self.block.storage(id), whole);
        Ok(())
    }

    fn is_ring(&self) -> bool {
        let mut ops = self.block.trace.forward.iter();
        ops.any(
            |op| matches!(op.kind, OpKind::Collective(c) if c.kind == CollectiveKind::RingExchange),
        )
    }

    /// Before backward of an attention whose keys and values go round the ring, has them here.
    pub(super) fn ring_again(&mut self, op: &Op, ids: [TensorId; 2]) -> Result<(), CudaError> {
        for id in ids {
            if self.is_ring() && !self.ring.contains_key(&self.block.storage(id)) {
                self.gather_ring(op, id)?;
            }
        }
        Ok(())
    }

    /// The gradient of keys or values of the whole sequence, back to the ranks that hold them.
    pub(super) fn return_ring(
        &self,
        op: &Op,
        of: TensorId,
        gradient: Tensor,
    ) -> Result<Tensor, CudaError> {
        if !self.is_ring() {
            return Ok(gradient);
        }
        let info = self.info(of);
        let moves = (Axis::Cp, Placement::Partial, info.placements.on(Axis::Cp));
        self.through_host(&gradient, |host, x| {
            host.redistribute(&op.scope, &x, info, moves)
        })
    }

    /// What the loss needs beside its logits.
    pub(super) fn losses(&self, logits: TensorId) -> Losses<'_> {
        let vocabulary = self.info(logits).global.len() - 1;
        Losses {
            labels: &self.batch.labels,
            first: self.first_index(logits, vocabulary),
            scale: self.batch.host.loss_scale,
        }
    }

    /// The loss's three numbers per token over the shards of the vocabulary.
    fn vocabulary_sums(&mut self, op: &Op, logits: TensorId) -> Result<(), CudaError> {
        let x = self.tensor(logits)?;
        let sums = self.device().loss_sums(x, &self.losses(logits))?;
        let own = self.device().download(&sums)?.into_f32();
        let host = &self.machine.host;
        let group = host.group(Axis::Tp);
        let arrived = group
            .all_gather(host.comm, &op.scope, pack(&own))
            .and_then(|pending| pending.wait(host.comm))
            .map_err(CpuError::from)?;
        let parts: Vec<Vec<f32>> = arrived.iter().map(|part| unpack(part)).collect();
        let all = cpu::Tensor::new(sums.shape.clone(), merged(&parts), DType::F32);
        let all = self.device().upload(&all)?;
        self.set(op.outputs[0], all);
        Ok(())
    }
}

/// Lines of largest logits, sums of exponentials relative to them and labels' logits, of all shards
/// together. Only one shard has a label; −0 from the others changes nothing.
fn merged(parts: &[Vec<f32>]) -> Vec<f32> {
    let rows = parts[0].len() / 3;
    let mut all = vec![f32::NEG_INFINITY; rows];
    for part in parts {
        for (largest, own) in all.iter_mut().zip(part) {
            *largest = largest.max(*own);
        }
    }
    all.resize(2 * rows, 0.0);
    all.resize(3 * rows, -0.0);
    for part in parts {
        for row in 0..rows {
            all[rows + row] += part[rows + row] * (part[row] - all[row]).exp();
            all[2 * rows + row] += part[2 * rows + row];
        }
    }
    all
}
