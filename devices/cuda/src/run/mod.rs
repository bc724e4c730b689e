//! Runs a block's passes on a device: the same program as the cpu device's, with kernels that take
//! several operators at once where the trace allows it.
//!
//! Fused here: a linear layer with its bias and a GELU after it, forward and backward; core attention; the loss with
//! the cast of its logits, which are never widened.

mod attention;
mod backward;
mod batch;
mod cut;
mod dispatch;
mod eight_bits;
mod exchange;
mod forward;
mod machine;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

pub use batch::Batch;
use eight_bits::Casts;
pub use machine::{Context, GradientSink, Machine, Parameters};

use super::error::CudaError;
use super::launcher::StreamArgument;
use super::ops::Route;
use super::tensor::{Device, Tensor};
use cpu_device::{Seen, Tensors};
use dtensor::block::pass::{self, Pass};
use dtensor::block::{self, Block, Half};

use catalog::DType;
use dtensor::plan::RoutedRows;
use dtensor::trace::{Op, TensorId, TensorInfo, TensorRole};

/// What a block keeps of a micro-batch between its passes.
pub type Saved = block::Saved<Tensor, Rc<Route>>;

/// Bytes that a block keeps: of memory that several tensors share, once.
#[must_use]
pub fn kept_bytes(saved: &Saved) -> u64 {
    let buffers = saved.values.values().map(Tensor::buffer);
    let buffers: HashMap<_, _> = buffers.map(|b| (b.address, b.bytes)).collect();
    let route = saved.route.as_ref().map_or(0, |route| route.bytes());
    buffers.values().sum::<u64>() + route
}

/// What a block returns from forward.
pub type Forward = block::Forward<Tensor, Saved>;

/// One pass of one micro-batch through a block.
struct Run<'r> {
    block: &'r Block,
    machine: &'r Machine<'r>,
    batch: &'r Batch<'r>,
    parameters: &'r Parameters<'r>,
    /// Everything that lives now.
    held: Saved,
    /// Keys and values of the whole sequence while attention runs round the ring.
    ring: BTreeMap<u32, Tensor>,
    /// Which half of backward runs; none in forward.
    half: Option<Half>,
    /// Whether products take GELUs: where they are quick at it, and nobody reads what lies between.
    gelus: bool,
    casts: Casts,
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
    pass::forward(block, Run::new(block, context, None), input)
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
    let run = Run::new(block, context, Some(half));
    pass::backward(block, run, saved, gradient, half, sink)
}

impl<'r> Pass for Run<'r> {
    type Tensor = Tensor;
    type Value = Tensor;
    type Route = Rc<Route>;
    type Sink = dyn GradientSink + 'r;
    type Error = CudaError;

    fn value(tensor: Tensor) -> Tensor {
        tensor
    }

    fn held(&mut self) -> &mut Saved {
        &mut self.held
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, CudaError> {
        Run::tensor(self, id)
    }

    fn forward_op(&mut self, op: usize) -> Result<(), CudaError> {
        Run::forward_op(self, op)
    }

    fn forward_view(&mut self, view: usize) -> Result<(), CudaError> {
        Run::forward_view(self, &self.block.trace.forward_views[view])
    }

    fn backward_op(&mut self, op: usize, sink: &mut Self::Sink) -> Result<(), CudaError> {
        Run::backward_op(self, op, sink)
    }

    fn backward_view(&mut self, view: usize) -> Result<(), CudaError> {
        Run::backward_view(self, &self.block.trace.backward_views[view])
    }

    fn ran(&self, op: &Op) -> Result<(), CudaError> {
        let Some(watch) = self.machine.host.watch else {
            return Ok(());
        };
        watch.ran(&Seen {
            tensors: self,
            op,
            block: self.block,
            micro_batch: &self.batch.host,
            rank: self.machine.host.comm.rank(),
        })?;
        Ok(())
    }

    fn routed(&self) -> Option<RoutedRows> {
        self.routed_rows()
    }
}

impl Tensors for Run<'_> {
    fn on_host(&self, id: TensorId) -> Option<Cow<'_, cpu_device::Tensor>> {
        let tensor = self.tensor(id).ok()?;
        self.device().download(tensor).ok().map(Cow::Owned)
    }
}

impl<'r> Run<'r> {
    fn new(block: &'r Block, context: &Context<'r>, half: Option<Half>) -> Self {
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

    fn device(&self) -> &'r Device {
        &self.machine.device
    }

    fn info(&self, id: TensorId) -> &'r TensorInfo {
        self.block.trace.tensor(id)
    }

    fn set(&mut self, id: TensorId, value: Tensor) {
        self.held.values.insert(self.block.storage(id), value);
    }

    fn tensor(&self, id: TensorId) -> Result<&Tensor, CudaError> {
        if self.info(id).role == TensorRole::Parameter {
            return Ok(self.parameters.parameter(id));
        }
        let value = self.held.values.get(&self.block.storage(id));
        value.ok_or_else(|| CudaError::Unsupported {
            operator: "reading".to_owned(),
            scope: self.info(id).name.clone(),
            reason: "a tensor that nothing wrote".to_owned(),
        })
    }

    fn stream(&self, op: &Op) -> StreamArgument {
        let (seed, step) = (self.machine.host.seed, self.batch.host.step);
        StreamArgument::new(self.block.stream(op, seed, step), self.batch.step())
    }

    fn routing(&self, op: &Op) -> Result<Rc<Route>, CudaError> {
        let route = self.held.route.as_ref().map(Rc::clone);
        route.ok_or_else(|| unsupported(op, "tokens that were not routed"))
    }

    fn first_index(&self, id: TensorId, dim: usize) -> u64 {
        self.block.first_index(id, dim, &self.machine.host.position)
    }
}

/// A factor in the type of what it multiplies.
fn rounded(factor: f64, dtype: DType) -> f32 {
    cpu_device::Tensor::new(vec![1], vec![factor as f32], dtype).f32()[0]
}

/// A typed refusal.
fn unsupported(op: &Op, reason: &str) -> CudaError {
    CudaError::Unsupported {
        operator: format!("{:?}", op.kind),
        scope: op.scope.clone(),
        reason: reason.to_owned(),
    }
}
