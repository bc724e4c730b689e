//! Runs a block's passes: one kernel per traced operator.

mod attention;
mod backward;
mod expert;
mod matmul;
mod rows;
mod token;

use crate::block::{GradientSink, Parameters, Saved};
use crate::elementwise;
use crate::experts::Route;
use crate::machine::{CpuError, Machine, MicroBatch};
use crate::redistribute::take;
use crate::tensor::{Tensor, Value};
use crate::watch::{Seen, Tensors};
use dtensor::block::pass::{self, Pass};
use dtensor::block::{self, Block, Half};
use dtensor::philox::Stream;
use dtensor::plan::RoutedRows;
use dtensor::trace::{
    CollectiveKind, Detail, Op, OpKind, TensorId, TensorInfo, TensorRole, View, ViewKind,
};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One pass of one micro-batch through a block.
struct Run<'r> {
    block: &'r Block,
    machine: &'r Machine<'r>,
    batch: &'r MicroBatch<'r>,
    parameters: &'r Parameters<'r>,
    /// Everything that lives now.
    held: Saved,
    /// Keys and values of the whole sequence while attention runs round the ring.
    ring: BTreeMap<u32, Arc<Value>>,
}

/// Who runs a pass, on what, with which parameters.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The rank.
    pub machine: &'a Machine<'a>,
    /// The micro-batch.
    pub batch: &'a MicroBatch<'a>,
    /// The block's parameters.
    pub parameters: &'a Parameters<'a>,
}

/// What a block returns from forward.
pub type Forward = block::Forward<Tensor, Saved>;

/// Forward of a micro-batch through a block. `input` is the previous block's output, absent for the
/// embedding.
///
/// # Errors
/// When communication stops or an operator has no kernel.
pub fn forward(
    block: &Block,
    context: &Context<'_>,
    input: Option<Tensor>,
) -> Result<Forward, CpuError> {
    pass::forward(block, Run::new(block, context), input)
}

/// Backward of a micro-batch, or half of it. `gradient` is that of the output; the loss block
/// needs none, nor does the weight half. Returns the gradient of the input.
///
/// # Errors
/// When communication stops or an operator has no kernel.
pub fn backward(
    block: &Block,
    context: &Context<'_>,
    saved: &mut Saved,
    gradient: Option<Tensor>,
    half: Half,
    sink: &mut dyn GradientSink,
) -> Result<Option<Tensor>, CpuError> {
    pass::backward(block, Run::new(block, context), saved, gradient, half, sink)
}

impl<'r> Pass for Run<'r> {
    type Tensor = Tensor;
    type Value = Arc<Value>;
    type Route = Arc<Route>;
    type Sink = dyn GradientSink + 'r;
    type Error = CpuError;

    fn value(tensor: Tensor) -> Arc<Value> {
        Arc::new(Value::Tensor(tensor))
    }

    fn held(&mut self) -> &mut Saved {
        &mut self.held
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, CpuError> {
        Run::tensor(self, id)
    }

    fn forward_op(&mut self, op: usize) -> Result<(), CpuError> {
        Run::forward_op(self, &self.block.trace.forward[op])
    }

    fn forward_view(&mut self, view: usize) -> Result<(), CpuError> {
        Run::forward_view(self, &self.block.trace.forward_views[view])
    }

    fn backward_op(&mut self, op: usize, sink: &mut Self::Sink) -> Result<(), CpuError> {
        Run::backward_op(self, &self.block.trace.backward[op], sink)
    }

    fn backward_view(&mut self, view: usize) -> Result<(), CpuError> {
        Run::backward_view(self, &self.block.trace.backward_views[view])
    }

    fn ran(&self, op: &Op) -> Result<(), CpuError> {
        let Some(watch) = self.machine.watch else {
            return Ok(());
        };
        watch.ran(&Seen {
            tensors: self,
            op,
            block: self.block,
            micro_batch: self.batch,
            rank: self.machine.comm.rank(),
        })?;
        Ok(())
    }

    fn routed(&self) -> Option<RoutedRows> {
        let mesh = &self.machine.position.mesh;
        self.held.route.as_ref().map(|route| route.rows(mesh))
    }
}

impl Tensors for Run<'_> {
    fn on_host(&self, id: TensorId) -> Option<Cow<'_, Tensor>> {
        self.tensor(id).ok().map(Cow::Borrowed)
    }
}

impl<'r> Run<'r> {
    fn new(block: &'r Block, context: &Context<'r>) -> Self {
        Self {
            block,
            machine: context.machine,
            batch: context.batch,
            parameters: context.parameters,
            held: Saved::default(),
            ring: BTreeMap::new(),
        }
    }

    fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    fn set(&mut self, id: TensorId, value: Value) {
        let storage = self.block.storage(id);
        self.held.values.insert(storage, Arc::new(value));
    }

    fn value(&self, id: TensorId) -> Result<&Value, CpuError> {
        let storage = self.block.storage(id);
        self.held
            .values
            .get(&storage)
            .map(AsRef::as_ref)
            .ok_or_else(|| {
                let info = self.info(id);
                CpuError::Unsupported {
                    operator: "reading".to_owned(),
                    scope: info.name.clone(),
                    reason: "a tensor that nothing wrote".to_owned(),
                }
            })
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, CpuError> {
        if self.info(id).role == TensorRole::Parameter {
            return Ok(self.parameters.parameter(id));
        }
        match self.value(id)? {
            Value::Tensor(tensor) => Ok(tensor),
            _ => Err(CpuError::Unsupported {
                operator: "reading".to_owned(),
                scope: self.info(id).name.clone(),
                reason: "partial sums before they are reduced".to_owned(),
            }),
        }
    }

    fn put_tensor(&mut self, id: TensorId, shape: Vec<usize>, data: Vec<f32>) {
        let dtype = self.info(id).dtype;
        self.set(id, Value::Tensor(Tensor::new(shape, data, dtype)));
    }

    fn threads(&self) -> usize {
        self.machine.threads
    }

    fn stream(&self, op: &Op) -> Stream {
        self.block.stream(op, self.machine.seed, self.batch.step)
    }

    fn forward_view(&mut self, view: &View) -> Result<(), CpuError> {
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

    fn forward_op(&mut self, op: &Op) -> Result<(), CpuError> {
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
            OpKind::Copy => {
                let x = self.tensor(op.inputs[0])?;
                let (shape, data) = (x.shape.clone(), x.f32().into_owned());
                self.put_tensor(op.outputs[0], shape, data);
                Ok(())
            }
            OpKind::Embedding => self.embedding(op),
            OpKind::CrossEntropy => self.cross_entropy(op),
            OpKind::TopK => self.top_k(op),
            OpKind::Permute => self.permute(op),
            OpKind::Unpermute => self.unpermute(op),
            OpKind::Collective(collective) => self.collective(op, collective.kind),
            OpKind::Scale => self.scale(op),
        }
    }

    fn collective(&mut self, op: &Op, kind: CollectiveKind) -> Result<(), CpuError> {
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
