//! Runs a block's passes on a device: the same program as the cpu device's, with kernels that take
//! several operators at once where the trace allows it.
//!
//! Fused here: a linear layer with its bias; core attention; the loss with the cast of its logits, which
//! are never widened.

mod attention;
mod backward;
mod forward;
mod machine;

use std::collections::BTreeMap;
use std::rc::Rc;

pub use machine::{Batch, Context, GradientSink, Machine, Parameters, Watch};

use super::error::CudaError;
use super::ops::Route;
use super::tensor::{Device, Tensor};
use crate::block::{Block, Half, Keep, Step};
use crate::philox::Stream;
use crate::trace::{Detail, Op, OpKind, Pass, TensorId, TensorInfo, TensorRole};
use spec::model::Router;

/// What a block keeps of a micro-batch between its passes.
#[derive(Default)]
pub struct Saved {
    values: BTreeMap<u32, Tensor>,
    route: Option<Rc<Route>>,
}

/// What a block returns from forward.
pub struct Forward {
    /// Its output: what the next block reads, or the loss of every token.
    pub output: Tensor,
    /// What it keeps.
    pub saved: Saved,
}

/// One pass of one micro-batch through a block.
struct Run<'r> {
    block: &'r Block,
    machine: &'r Machine<'r>,
    batch: &'r Batch<'r>,
    parameters: &'r dyn Parameters,
    values: BTreeMap<u32, Tensor>,
    route: Option<Rc<Route>>,
}

/// Forward of a micro-batch through a block whose attention is fused. `input` is the previous block's
/// output, absent for the embedding.
///
/// # Errors
/// When memory or the device fails, or an operator has no kernel.
pub fn forward(
    block: &Block,
    context: &Context<'_>,
    input: Option<Tensor>,
) -> Result<Forward, CudaError> {
    let mut run = Run::new(block, context);
    if let Some(input) = input {
        run.set_input(input);
    }
    for (index, &step) in block.forward.iter().enumerate() {
        run.forward_step(step)?;
        run.watched(step, &block.trace.forward)?;
        for storage in &block.forward_dies[index] {
            run.values.remove(storage);
        }
    }
    let output = block.trace.output.expect("a traced block has an output");
    let output = run.tensor(output)?.clone();
    let mut values = run.values;
    values.retain(|storage, _| block.kept.contains(storage));
    let route = (block.keep != Keep::Input).then_some(run.route).flatten();
    Ok(Forward {
        output,
        saved: Saved { values, route },
    })
}

/// Backward of a micro-batch, or half of it. `gradient` is that of the output; the loss block needs none,
/// nor does the weight half. Returns the gradient of the input.
///
/// # Errors
/// When memory or the device fails, or an operator has no kernel.
pub fn backward(
    block: &Block,
    context: &Context<'_>,
    saved: &mut Saved,
    gradient: Option<Tensor>,
    half: Half,
    sink: &mut dyn GradientSink,
) -> Result<Option<Tensor>, CudaError> {
    let mut run = Run::new(block, context);
    run.values = std::mem::take(&mut saved.values);
    run.route = saved.route.take();
    if half != Half::Weight {
        for &index in &block.again {
            run.forward_step(block.forward[index])?;
            run.watched(block.forward[index], &block.trace.forward)?;
        }
        if let (Some(gradient), Some(id)) = (gradient, block.trace.output_gradient) {
            run.set(id, gradient);
        }
    }
    for (index, &step) in block.backward.iter().enumerate() {
        let weight =
            matches!(step, Step::Op(op) if block.trace.backward[op].pass == Pass::BackwardWeight);
        match half {
            Half::Input if weight => continue,
            Half::Weight if !weight => continue,
            _ => run.backward_step(step, sink)?,
        }
        run.watched(step, &block.trace.backward)?;
        for storage in &block.backward_dies[index] {
            if half == Half::Both || !block.weight_reads.contains(storage) {
                run.values.remove(storage);
            }
        }
    }
    let result = match block.trace.input_gradient.filter(|_| half != Half::Weight) {
        Some(id) => Some(run.tensor(id)?.clone()),
        None => None,
    };
    if half == Half::Input {
        saved.values = run.values;
        let reads = &block.weight_reads;
        saved.values.retain(|storage, _| reads.contains(storage));
        saved.route = run.route;
    }
    Ok(result)
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
        }
    }

    fn watched(&self, step: Step, ops: &[Op]) -> Result<(), CudaError> {
        match (self.machine.watch, step) {
            (Some(watch), Step::Op(op)) => watch.ran(self.block, &ops[op]),
            _ => Ok(()),
        }
    }

    fn device(&self) -> &'r Device {
        self.machine.device
    }

    fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    fn set_input(&mut self, input: Tensor) {
        let mut tensors = self.block.trace.tensors.iter();
        if let Some(info) = tensors.find(|t| t.role == TensorRole::Input) {
            self.values.insert(info.storage.0, input);
        }
    }

    fn set(&mut self, id: TensorId, value: Tensor) {
        self.values.insert(self.block.storage(id), value);
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, CudaError> {
        if self.info(id).role == TensorRole::Parameter {
            return Ok(self.parameters.parameter(id));
        }
        let value = self.values.get(&self.block.storage(id));
        value.ok_or_else(|| CudaError::Unsupported {
            operator: "reading".to_owned(),
            scope: self.info(id).name.clone(),
            reason: "a tensor that nothing wrote".to_owned(),
        })
    }

    fn stream(&self, op: &Op) -> Stream {
        let operator = format!("{}{}", self.block.prefix, op.scope);
        Stream::new(self.machine.seed, self.batch.host.step, &operator)
    }

    fn routing(&self, op: &Op) -> Result<Rc<Route>, CudaError> {
        let route = self.route.as_ref().map(Rc::clone);
        route.ok_or_else(|| unsupported(op, "tokens that were not routed"))
    }

    /// First row of a table that this rank holds.
    fn first_row(&self, table: TensorId) -> u64 {
        let info = self.info(table);
        let position = &self.machine.position;
        let rows = position.indices(&info.global, &info.placements, 0);
        rows.first().copied().unwrap_or(info.global[0])
    }

    /// Entry of the vocabulary that the first column of the logits stands for.
    fn first_entry(&self, logits: TensorId) -> u64 {
        let info = self.info(logits);
        let dim = info.global.len() - 1;
        let position = &self.machine.position;
        let held = position.indices(&info.global, &info.placements, dim);
        held.first().copied().unwrap_or(info.global[dim])
    }

    /// Whether all that reads a tensor is the loss: it takes logits of any type.
    fn is_only_for_the_loss(&self, id: TensorId) -> bool {
        let storage = self.block.storage(id);
        let mut readers = self.block.trace.forward.iter().filter(|op| {
            let logits = match op.detail {
                Detail::VocabularySums { logits } => Some(logits),
                _ => None,
            };
            let mut reads = op.inputs.iter().chain(&logits);
            reads.any(|&id| self.block.storage(id) == storage)
        });
        readers.all(|op| {
            op.kind == OpKind::CrossEntropy || matches!(op.detail, Detail::VocabularySums { .. })
        })
    }
}

/// Whether a plain choice of experts, by softmax, normalises; nothing for any other choice.
fn plain_choice(detail: Detail) -> Option<bool> {
    let Detail::Route { router, bias: None } = detail else {
        return None;
    };
    let plain = Router {
        normalise: router.normalise,
        ..Router::default()
    };
    (router == plain).then_some(router.normalise)
}

/// A typed refusal.
fn unsupported(op: &Op, reason: &str) -> CudaError {
    CudaError::Unsupported {
        operator: format!("{:?}", op.kind),
        scope: op.scope.clone(),
        reason: reason.to_owned(),
    }
}
