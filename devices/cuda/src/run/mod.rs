//! Runs a block's forward and backward on a device: the same traced operators as on the cpu device, with kernels that
//! fuse several of them where the trace allows it.
//!
//! Fused here: a linear layer with its bias and a GELU after it, forward and backward; core attention; and the loss
//! with the cast of its logits, which are never widened to 32 bits.

mod attention;
mod backward;
mod batch;
mod cut;
mod dispatch;
mod eight_bits;
mod exchange;
mod forward;
mod machine;
mod redistribute;
mod state;

use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

pub use batch::Batch;
pub use machine::{Context, GradientSink, Machine, Parameters, Saved};
use state::Run;

use super::error::{CudaError, Result};
use super::ops::Route;
use super::tensor::Tensor;
use cpu_device::{Seen, Tensors};
use dtensor::block::pass::{self, Pass};
use dtensor::block::{self, Block, Half};

use dtensor::plan::RoutedRows;
use dtensor::{AnyOp, TensorId};

/// Bytes of memory that a block's saved tensors take; memory that several tensors share counts once.
#[must_use]
pub fn kept_bytes(saved: &Saved) -> u64 {
    let buffers = saved.values.values().map(Tensor::buffer);
    let buffers: HashMap<_, _> = buffers.map(|b| (b.address, b.bytes)).collect();
    let route = saved.route.as_ref().map_or(0, |route| route.bytes());
    buffers.values().sum::<u64>() + route
}

/// What a block returns from forward.
pub type Forward = block::Forward<Tensor, Saved>;

/// Runs the forward of a micro-batch through a block, with fused attention. `input` is the previous block's output; the
/// embedding has none.
///
/// # Errors
/// When memory or the device fails, or an operator has no kernel.
pub fn forward(block: &Block, context: &Context<'_>, input: Option<Tensor>) -> Result<Forward> {
    pass::forward(block, Run::new(block, context, None), input)
}

/// Runs the backward of a micro-batch, or its input or weight half. `gradient` is the output's; the
/// loss block and the weight half need none. Returns the input's gradient, if it is computed.
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
) -> Result<Option<Tensor>> {
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

    fn tensor(&self, id: TensorId) -> Result<&Tensor> {
        Run::tensor(self, id)
    }

    fn forward_op(&mut self, op: usize) -> Result<()> {
        Run::forward_op(self, op)
    }

    fn forward_view(&mut self, view: usize) -> Result<()> {
        Run::forward_view(self, &self.block.trace.forward_views[view])
    }

    fn backward_op(&mut self, op: usize, sink: &mut Self::Sink) -> Result<()> {
        Run::backward_op(self, op, sink)
    }

    fn backward_view(&mut self, view: usize) -> Result<()> {
        Run::backward_view(self, &self.block.trace.backward_views[view])
    }

    fn ran(&self, op: AnyOp<'_>) -> Result<()> {
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
