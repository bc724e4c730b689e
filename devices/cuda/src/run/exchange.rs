//! Exchanges between ranks inside a block.

use super::state::Run;
use crate::error::Result;
use crate::links::Collective;
use crate::ops::Losses;
use crate::tensor::Tensor;
use catalog::{Axis, DType};
use dtensor::placement::Placement;
use dtensor::{Exchange, Moves, Op, TensorId, View};

impl Run<'_> {
    pub(super) fn exchange<O>(&mut self, op: &Op<O>, exchange: Exchange) -> Result<()> {
        match exchange.moves {
            Moves::Redistribute { from, to } => {
                let (id, axis) = (op.inputs[0], exchange.collective.axis);
                let mut info = self.info(id).clone();
                info.placements = info.placements.with(axis, from);
                let moves = (axis, from, to);
                let x = self.tensor(id)?;
                let out = self.machine.redistribute(&op.scope, x, &info, moves)?;
                self.set(op.outputs[0], out);
                Ok(())
            }
            Moves::Dispatch => self.dispatch(op, Axis::Ep, false),
            Moves::Combine => self.dispatch(op, Axis::Ep, true),
            Moves::ExpertGather => self.dispatch(op, Axis::Etp, false),
            Moves::ExpertReduce => self.dispatch(op, Axis::Etp, true),
            Moves::VocabularySums(logits) => self.vocabulary_sums(op, logits),
            Moves::Ring => op
                .inputs
                .iter()
                .try_for_each(|&id| self.gather_ring(&op.scope, id)),
        }
    }

    /// This rank's shard of a tensor that it holds whole.
    pub(super) fn shard(&mut self, view: &View) -> Result<()> {
        let [from, to] = [view.from, view.to].map(|id| self.info(id));
        let part = self.machine.shard(self.tensor(view.from)?, from, to)?;
        self.set(view.to, part);
        Ok(())
    }

    /// Keys or values of the whole sequence: the tensor itself, or what the ring gathered.
    pub(super) fn keys(&self, id: TensorId) -> Result<&Tensor> {
        match self.ring.get(&self.block.storage(id)) {
            Some(whole) => Ok(whole),
            None => self.tensor(id),
        }
    }

    fn gather_ring(&mut self, scope: &str, id: TensorId) -> Result<()> {
        let info = self.info(id);
        let shards = (Axis::Cp, info.placements.on(Axis::Cp));
        let part = self.tensor(id)?;
        let whole = self.machine.all_gather(scope, part, info, shards)?;
        self.ring.insert(self.block.storage(id), whole);
        Ok(())
    }

    /// Before the backward of ring attention, gathers keys and values again.
    pub(super) fn ring_again(&mut self, scope: &str, ids: [TensorId; 2]) -> Result<()> {
        for id in ids {
            if self.block.has_ring() && !self.ring.contains_key(&self.block.storage(id)) {
                self.gather_ring(scope, id)?;
            }
        }
        Ok(())
    }

    /// Reduces the gradient of keys or values of the whole sequence to the ranks that hold them.
    pub(super) fn return_ring(
        &self,
        scope: &str,
        of: TensorId,
        gradient: Tensor,
    ) -> Result<Tensor> {
        if !self.block.has_ring() {
            return Ok(gradient);
        }
        let info = self.info(of);
        let moves = (Axis::Cp, Placement::Partial, info.placements.on(Axis::Cp));
        self.machine.redistribute(scope, &gradient, info, moves)
    }

    /// Inputs of the loss beside its logits.
    pub(super) fn losses(&self, logits: TensorId) -> Losses<'_> {
        let vocabulary = self.info(logits).global.len() - 1;
        Losses {
            labels: &self.batch.words.labels,
            first: self.first_index(logits, vocabulary),
            scale: self.batch.host.loss_scale,
        }
    }

    /// The loss's three numbers per token, merged over the vocabulary shards.
    fn vocabulary_sums<O>(&mut self, op: &Op<O>, logits: TensorId) -> Result<()> {
        let x = self.tensor(logits)?;
        let own = self.device().loss_sums(x, &self.losses(logits))?;
        let group = self.machine.host.group(Axis::Tp);
        let lines = own.len();
        let all = vec![group.size(), lines];
        let all = self.device().tensor(all, DType::F32)?;
        let parts: Vec<_> = (0..group.size())
            .map(|member| all.part(member * lines, own.shape.clone()))
            .collect();
        let links = &self.machine.links;
        links.exchange(Collective::AllGather, group, &op.scope, &[own], &parts)?;
        let sums = self.device().merged_sums(&all, x.rows())?;
        self.set(op.outputs[0], sums);
        Ok(())
    }
}
