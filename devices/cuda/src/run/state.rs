//! One pass of a micro-batch through a block: its inputs, and the tensors that are alive.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::batch::Batch;
use super::machine::{Context, Machine, Parameters, Saved};
use crate::error::{CudaError, Result};
use crate::launcher::StreamArgument;
use crate::ops::{Matrix8, Route};
use crate::tensor::{Device, Tensor};
use catalog::DType;
use dtensor::block::{Block, Half};
use dtensor::{Op, TensorId, TensorInfo};

/// One pass of one micro-batch through a block.
pub(super) struct Run<'r> {
    pub(super) block: &'r Block,
    pub(super) machine: &'r Machine<'r>,
    pub(super) batch: &'r Batch<'r>,
    pub(super) parameters: &'r Parameters<'r>,
    /// All tensors and routes that are alive.
    pub(super) held: Saved,
    /// Gathered keys and values of the whole sequence while ring attention runs.
    pub(super) ring: BTreeMap<u32, Tensor>,
    /// Which half of backward runs; `None` in forward.
    pub(super) half: Option<Half>,
    /// Whether GEMMs fuse GELUs: where that is faster, and no watch reads the tensor between.
    pub(super) gelus: bool,
    pub(super) casts: Casts,
}

/// The last FP8 casts, for GEMMs that read them again: a layer's projections read the same
/// activations, and both gradients of a linear layer read the gradient of its output.
#[derive(Default)]
pub(super) struct Casts {
    pub(super) activation: RefCell<Option<(TensorId, Matrix8)>>,
    pub(super) gradient: RefCell<Option<(TensorId, Matrix8)>>,
}

impl<'r> Run<'r> {
    pub(super) fn new(block: &'r Block, context: &Context<'r>, half: Option<Half>) -> Self {
        let machine = context.machine;
        let read = machine.host.watch.is_some_and(|watch| watch.reads());
        Self {
            block,
            machine,
            batch: context.batch,
            parameters: context.parameters,
            held: Saved::default(),
            ring: BTreeMap::new(),
            half,
            gelus: !read && machine.device.launcher.fuses_gelu(),
            casts: Casts::default(),
        }
    }

    pub(super) fn device(&self) -> &'r Device {
        &self.machine.device
    }

    pub(super) fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    pub(super) fn set(&mut self, id: TensorId, value: Tensor) {
        self.held.values.insert(self.block.storage(id), value);
    }

    pub(super) fn tensor(&self, id: TensorId) -> Result<&Tensor> {
        if self.info(id).role.is_weight() {
            return Ok(self.parameters.parameter(id));
        }
        let value = self.held.values.get(&self.block.storage(id));
        value.ok_or_else(|| {
            let name = &self.info(id).name;
            CudaError::unsupported("reading", name, "a tensor that nothing wrote")
        })
    }

    pub(super) fn stream(&self, op: &Op) -> StreamArgument {
        let (seed, step) = (self.machine.host.seed, self.batch.host.step);
        StreamArgument::new(self.block.stream(op, seed, step), self.batch.step())
    }

    pub(super) fn routing(&self, scope: &str) -> Result<Rc<Route>> {
        let route = self.held.route.as_ref().map(Rc::clone);
        route.ok_or_else(|| CudaError::unsupported("routing", scope, "tokens that were not routed"))
    }

    pub(super) fn first_index(&self, id: TensorId, dim: usize) -> u64 {
        self.block.first_index(id, dim, &self.machine.host.position)
    }
}

/// A scalar factor rounded to the type of the tensor it multiplies.
pub(super) fn rounded(factor: f64, dtype: DType) -> f32 {
    cpu_device::Tensor::new(vec![1], vec![factor as f32], dtype).f32()[0]
}

/// Why a recurrence is refused.
pub(super) const UNTRAINED: &str = "recurrent layers: they are planned and predicted, not trained";

/// The error for an operator that runs on the cpu only.
pub(super) fn no_kernel(operator: &str, scope: &str) -> CudaError {
    CudaError::unsupported(operator, scope, "any operand; only the cpu device has one")
}

/// Name, in errors, of a bounded gated unit whose gate and up values lie in one tensor.
pub(super) const FUSED_BOUNDED: &str = "bounded activation of fused projections";
