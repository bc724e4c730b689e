//! Runs a block's forward and backward: one kernel per traced operator.

mod attention;
mod backward;
mod expert;
mod forward;
mod matmul;
mod rows;
mod state;
mod token;

use std::borrow::Cow;
use std::sync::Arc;

use dtensor::block::pass::{self, Pass};
use dtensor::block::{self, Block, Half};
use dtensor::plan::RoutedRows;
use dtensor::{AnyOp, TensorId};

use self::state::Run;
use crate::block::{GradientSink, Saved};
use crate::experts::Route;
use crate::machine::{CpuError, Result};
use crate::tensor::Tensor;
use crate::value::Value;
use crate::watch::{Seen, Tensors};

pub use state::Context;

/// What a block returns from forward.
pub type Forward = block::Forward<Tensor, Saved>;

/// Runs the forward of a micro-batch through a block. `input` is the previous block's output; the embedding has none.
///
/// # Errors
/// When communication stops or an operator has no kernel.
pub fn forward(block: &Block, context: &Context<'_>, input: Option<Tensor>) -> Result<Forward> {
    pass::forward(block, Run::new(block, context), input)
}

/// Runs the backward of a micro-batch, or its input or weight half. `gradient` is the output's; the
/// loss block and the weight half need none. Returns the input's gradient, if it is computed.
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
) -> Result<Option<Tensor>> {
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

    fn tensor(&self, id: TensorId) -> Result<&Tensor> {
        Run::tensor(self, id)
    }

    fn forward_op(&mut self, op: usize) -> Result<()> {
        Run::forward_op(self, &self.block.trace.forward[op])
    }

    fn forward_view(&mut self, view: usize) -> Result<()> {
        Run::forward_view(self, &self.block.trace.forward_views[view])
    }

    fn backward_op(&mut self, op: usize, sink: &mut Self::Sink) -> Result<()> {
        Run::backward_op(self, &self.block.trace.backward[op], sink)
    }

    fn backward_view(&mut self, view: usize) -> Result<()> {
        Run::backward_view(self, &self.block.trace.backward_views[view])
    }

    fn ran(&self, op: AnyOp<'_>) -> Result<()> {
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
