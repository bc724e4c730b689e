//! Forward of a pass: which kernel each traced operator runs.

use dtensor::trace::{CollectiveKind, Detail, Op, OpKind, View, ViewKind};

use super::state::Run;
use crate::elementwise;
use crate::machine::{CpuError, Machine};
use crate::redistribute::take;
use crate::tensor::Tensor;
use crate::value::Value;

impl Run<'_> {
    pub(super) fn forward_view(&mut self, view: &View) -> Result<(), CpuError> {
        let x = self.tensor(view.from)?;
        let part = match view.kind {
            ViewKind::Shard => self
                .machine
                .shard(x, self.info(view.from), self.info(view.to)),
            ViewKind::Columns(part) => {
                let [columns, start, number] = part.local(x.columns());
                let rows: Vec<usize> = (0..x.len() / columns.max(1)).collect();
                let picked = (start..start + number).collect();
                let flat = [rows.len(), columns];
                let mut shape = x.shape.clone();
                *shape.last_mut().expect("sliced tensors have a last dim") =
                    rows.len() * number / x.rows().max(1);
                let data = take(&x.f32(), &flat, &[rows, picked]);
                Tensor::new(shape, data, x.dtype())
            }
        };
        self.set(view.to, Value::Tensor(part));
        Ok(())
    }

    pub(super) fn forward_op(&mut self, op: &Op) -> Result<(), CpuError> {
        match op.kind {
            OpKind::Matmul { .. } => self.linear(op),
            OpKind::GroupedMatmul { .. } => self.grouped_linear(op),
            OpKind::AttentionScores(shape) => self.attention_scores(op, &shape),
            OpKind::Softmax(shape) => self.softmax(op, &shape),
            OpKind::AttentionContext(shape) => self.attention_context(op, &shape),
            OpKind::Norm => self.norm(op),
            OpKind::Activation { gated } => self.activation(op, gated),
            OpKind::Add => {
                let (a, b) = (self.tensor(op.inputs[0])?, self.tensor(op.inputs[1])?);
                let mut out = a.f32().into_owned();
                let b = b.f32();
                elementwise::add(&mut out, &b, self.threads());
                let shape = a.shape.clone();
                self.put_tensor(op.outputs[0], shape, out);
                Ok(())
            }
            OpKind::Bias if op.detail == Detail::ExpertBias => self.expert_bias(op),
            OpKind::Bias => self.bias(op),
            OpKind::Dropout => self.dropout(op),
            OpKind::Rope => self.rope(op, false, op.inputs[0], op.outputs[0]),
            OpKind::Copy if matches!(op.detail, Detail::Join { .. }) => self.join(op),
            OpKind::Copy => self.copy(op.inputs[0], op.outputs[0]),
            OpKind::Embedding => self.embedding(op),
            OpKind::CrossEntropy => self.cross_entropy(op),
            OpKind::TopK => self.top_k(op),
            OpKind::Permute => self.permute(op),
            OpKind::Unpermute => self.unpermute(op),
            OpKind::Collective(collective) => self.collective(op, collective.kind),
            OpKind::Scale => self.scale(op),
        }
    }

    pub(super) fn collective(&mut self, op: &Op, kind: CollectiveKind) -> Result<(), CpuError> {
        match op.detail {
            Detail::Redistribute { axis, from, to } => {
                let (x, out) = (op.inputs[0], op.outputs[0]);
                let mut info = self.info(x).clone();
                info.placements = info.placements.with(axis, from);
                let value = self.machine.redistribute(
                    &op.scope,
                    self.value(x)?,
                    &info,
                    (axis, from, to),
                )?;
                self.set(out, value);
                Ok(())
            }
            Detail::Dispatch { back } => self.dispatch(op, back),
            Detail::ExpertTensor { gather } => self.expert_tensor(op, gather),
            Detail::VocabularySums { logits } => self.vocabulary_sums(op, logits),
            _ if kind == CollectiveKind::RingExchange => {
                for &id in &op.inputs {
                    self.gather_ring(op, id)?;
                }
                Ok(())
            }
            _ => Err(Machine::unsupported(op, "this collective")),
        }
    }
}
