//! Runs a block's passes: one kernel per traced operator.

mod attention;
mod backward;
mod expert;
mod matmul;
mod rows;
mod token;

use crate::block::{Block, Half, Keep, Step};
use crate::cpu::block::{GradientSink, Parameters, Saved};
use crate::cpu::elementwise;
use crate::cpu::experts::Route;
use crate::cpu::machine::{CpuError, Machine, MicroBatch};
use crate::cpu::redistribute::take;
use crate::cpu::tensor::{Tensor, Value};
use crate::philox::Stream;
use crate::plan::RoutedRows;
use crate::trace::{
    CollectiveKind, Detail, Op, OpKind, Pass, TensorId, TensorInfo, TensorRole, View, ViewKind,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One pass of one micro-batch through a block.
struct Run<'r> {
    block: &'r Block,
    machine: &'r Machine<'r>,
    batch: &'r MicroBatch<'r>,
    parameters: &'r dyn Parameters,
    values: BTreeMap<u32, Arc<Value>>,
    route: Option<Arc<Route>>,
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
    pub parameters: &'a dyn Parameters,
}

/// An operator that has just run.
pub struct Seen<'s> {
    run: &'s Run<'s>,
    /// The operator.
    pub op: &'s Op,
}

impl Seen<'_> {
    /// The block it belongs to.
    #[must_use]
    pub fn block(&self) -> &Block {
        self.run.block
    }

    /// The micro-batch it ran on.
    #[must_use]
    pub fn micro_batch(&self) -> &MicroBatch<'_> {
        self.run.batch
    }

    /// Its full name, such as `model.layers.3.self_attn.q_proj`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}{}", self.run.block.prefix, self.op.scope)
    }

    /// The rank that ran it.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.run.machine.comm.rank()
    }

    /// Its name with its kind, such as `model.layers.3.self_attn.q_proj Matmul`.
    #[must_use]
    pub fn title(&self) -> String {
        let kind = format!("{:?}", self.op.kind);
        let end = kind.find([' ', '(', '{']).unwrap_or(kind.len());
        format!("{} {}", self.name(), &kind[..end])
    }

    /// Its pass, in words.
    #[must_use]
    pub fn pass(&self) -> &'static str {
        match self.op.pass {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward",
            Pass::BackwardWeight => "weight gradient",
        }
    }

    /// The tensors of a list that hold numbers now, with what they are. Partial sums of exact mode
    /// are not numbers yet.
    pub fn tensors<'t>(
        &'t self,
        ids: &'t [TensorId],
    ) -> impl Iterator<Item = (&'t TensorInfo, &'t Tensor)> {
        ids.iter().filter_map(|&id| {
            let tensor = self.run.tensor(id).ok()?;
            Some((self.run.info(id), tensor))
        })
    }
}

/// What a block returns from forward.
#[derive(Debug)]
pub struct Forward {
    /// Its output: what the next block reads, or the loss of every token.
    pub output: Tensor,
    /// What it keeps.
    pub saved: Saved,
    /// Rows that reached this rank's experts, if it has experts.
    pub routed: Option<RoutedRows>,
}

impl Block {
    /// Forward of a micro-batch. `input` is the previous block's output, absent for the embedding.
    ///
    /// # Errors
    /// When communication stops or an operator has no kernel.
    pub fn forward(
        &self,
        context: &Context<'_>,
        input: Option<Tensor>,
    ) -> Result<Forward, CpuError> {
        let mut run = Run::new(self, context);
        if let Some(input) = input {
            run.set_input(input);
        }
        for (index, &step) in self.forward.iter().enumerate() {
            run.forward_step(step)?;
            run.watched(step, &self.trace.forward)?;
            for storage in &self.forward_dies[index] {
                run.values.remove(storage);
            }
        }
        let output = self.trace.output.expect("a traced block has an output");
        let output = run.tensor(output)?.clone();
        let mut values = run.values;
        values.retain(|storage, _| self.kept.contains(storage));
        let mesh = &context.machine.position.mesh;
        let routed = run.route.as_ref().map(|route| route.rows(mesh));
        let route = (self.keep != Keep::Input).then_some(run.route).flatten();
        Ok(Forward {
            output,
            saved: Saved { values, route },
            routed,
        })
    }

    /// Backward of a micro-batch, or half of it. `gradient` is that of the output; the loss block
    /// needs none, nor does the weight half. Returns the gradient of the input.
    ///
    /// # Errors
    /// When communication stops or an operator has no kernel.
    pub fn backward(
        &self,
        context: &Context<'_>,
        saved: &mut Saved,
        gradient: Option<Tensor>,
        half: Half,
        sink: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>, CpuError> {
        let mut run = Run::new(self, context);
        run.values = std::mem::take(&mut saved.values);
        run.route = saved.route.take();
        if half != Half::Weight {
            for &index in &self.again {
                run.forward_step(self.forward[index])?;
                run.watched(self.forward[index], &self.trace.forward)?;
            }
            if let (Some(gradient), Some(id)) = (gradient, self.trace.output_gradient) {
                run.set(id, Value::Tensor(gradient));
            }
        }
        for (index, &step) in self.backward.iter().enumerate() {
            let weight = matches!(step, Step::Op(op) if self.trace.backward[op].pass == Pass::BackwardWeight);
            match half {
                Half::Input if weight => continue,
                Half::Weight if !weight => continue,
                _ => run.backward_step(step, sink)?,
            }
            run.watched(step, &self.trace.backward)?;
            for storage in &self.backward_dies[index] {
                if half == Half::Both || !self.weight_reads.contains(storage) {
                    run.values.remove(storage);
                }
            }
        }
        let result = match self.trace.input_gradient.filter(|_| half != Half::Weight) {
            Some(id) => Some(run.tensor(id)?.clone()),
            None => None,
        };
        if half == Half::Input {
            saved.values = run.values;
            saved
                .values
                .retain(|storage, _| self.weight_reads.contains(storage));
            saved.route = run.route;
        }
        Ok(result)
    }
}

impl<'r> Run<'r> {
    fn new(block: &'r Block, context: &Context<'r>) -> Self {
        Self {
            block,
            machine: context.machine,
            batch: context.batch,
            parameters: context.parameters,
            values: BTreeMap::new(),
            route: None,
            ring: BTreeMap::new(),
        }
    }

    /// Shows an operator that has run to the machine's watch.
    fn watched(&self, step: Step, ops: &'r [Op]) -> Result<(), CpuError> {
        match (self.machine.watch, step) {
            (Some(watch), Step::Op(op)) => watch.ran(&Seen {
                run: self,
                op: &ops[op],
            }),
            _ => Ok(()),
        }
    }

    fn set_input(&mut self, input: Tensor) {
        let tensors = &self.block.trace.tensors;
        if let Some(info) = tensors.iter().find(|t| t.role == TensorRole::Input) {
            let value = Arc::new(Value::Tensor(input));
            self.values.insert(info.storage.0, value);
        }
    }

    fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    fn set(&mut self, id: TensorId, value: Value) {
        let storage = self.block.storage(id);
        self.values.insert(storage, Arc::new(value));
    }

    fn value(&self, id: TensorId) -> Result<&Value, CpuError> {
        let storage = self.block.storage(id);
        self.values.get(&storage).map(AsRef::as_ref).ok_or_else(|| {
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
        let operator = format!("{}{}", self.block.prefix, op.scope);
        Stream::new(self.machine.seed, self.batch.step, &operator)
    }

    fn forward_step(&mut self, step: Step) -> Result<(), CpuError> {
        match step {
            Step::Op(op) => {
                let op = &self.block.trace.forward[op];
                self.forward_op(op)
            }
            Step::View(view) => self.forward_view(&self.block.trace.forward_views[view]),
        }
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
