//! One pass of a micro-batch through a block: its inputs, and the tensors that are alive.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use dtensor::block::Block;
use dtensor::philox::Stream;
use dtensor::{Op, TensorId, TensorInfo};

use crate::block::{GradientSink, Parameters, Saved};
use crate::machine::{Leaves, Machine, Result};
use crate::micro_batch::MicroBatch;
use crate::tensor::Tensor;
use crate::tree::TreeSum;
use crate::value::Value;

/// One pass of one micro-batch through a block.
pub(super) struct Run<'r> {
    pub(super) block: &'r Block,
    pub(super) machine: &'r Machine<'r>,
    pub(super) batch: &'r MicroBatch<'r>,
    pub(super) parameters: &'r Parameters<'r>,
    /// All tensors and routes that are alive.
    pub(super) held: Saved,
    /// Gathered keys and values of the whole sequence while ring attention runs.
    pub(super) ring: BTreeMap<u32, Arc<Value>>,
}

/// The inputs of a pass: rank, micro-batch and parameters.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The rank that runs it.
    pub machine: &'a Machine<'a>,
    /// The micro-batch.
    pub batch: &'a MicroBatch<'a>,
    /// The block's parameters.
    pub parameters: &'a Parameters<'a>,
}

impl<'r> Run<'r> {
    pub(super) fn new(block: &'r Block, context: &Context<'r>) -> Self {
        Self {
            block,
            machine: context.machine,
            batch: context.batch,
            parameters: context.parameters,
            held: Saved::default(),
            ring: BTreeMap::new(),
        }
    }

    pub(super) fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    /// Positions in their sequence of a tensor's tokens.
    pub(super) fn positions_of(&self, id: TensorId) -> Vec<u64> {
        self.machine.positions(self.info(id))
    }

    pub(super) fn set(&mut self, id: TensorId, value: Value) {
        let storage = self.block.storage(id);
        self.held.values.insert(storage, Arc::new(value));
    }

    pub(super) fn value(&self, id: TensorId) -> Result<&Value> {
        let storage = self.block.storage(id);
        let value = self.held.values.get(&storage).map(AsRef::as_ref);
        value.ok_or_else(|| {
            let name = &self.info(id).name;
            Machine::unsupported("reading", name, "a tensor that nothing wrote")
        })
    }

    pub(super) fn tensor(&self, id: TensorId) -> Result<&Tensor> {
        if self.info(id).role.is_weight() {
            return Ok(self.parameters.parameter(id));
        }
        match self.value(id)? {
            Value::Tensor(tensor) => Ok(tensor),
            _ => {
                let reason = "partial sums before they are reduced";
                let name = &self.info(id).name;
                Err(Machine::unsupported("reading", name, reason))
            }
        }
    }

    pub(super) fn put_tensor(&mut self, id: TensorId, shape: Vec<usize>, data: Vec<f32>) {
        let dtype = self.info(id).dtype;
        self.set(id, Value::Tensor(Tensor::new(shape, data, dtype)));
    }

    /// Adds to part of a parameter's gradient what `add` sums over rows: over all of them, or in exact mode over the leaves
    /// that they belong to.
    pub(super) fn accumulate(
        &self,
        sink: &mut dyn GradientSink,
        (parameter, part): (TensorId, Range<usize>),
        (rows, leaves): (Range<usize>, impl FnOnce() -> Result<Leaves>),
        add: impl Fn(Range<usize>, &mut [f32]),
    ) -> Result<()> {
        if self.machine.is_exact() {
            let sum = TreeSum::of(&leaves()?, part.len(), add);
            sink.tree(parameter, part, sum);
        } else {
            add(rows, &mut sink.plain(parameter)[part]);
        }
        Ok(())
    }

    /// Copies a traced tensor to another, converted to that one's type.
    pub(super) fn copy(&mut self, from: TensorId, to: TensorId) -> Result<()> {
        let x = self.tensor(from)?;
        let (shape, data) = (x.shape.clone(), x.f32().into_owned());
        self.put_tensor(to, shape, data);
        Ok(())
    }

    pub(super) fn threads(&self) -> usize {
        self.machine.threads
    }

    pub(super) fn stream(&self, op: &Op) -> Stream {
        self.block.stream(op, self.machine.seed, self.batch.step)
    }
}
