//! What a block's passes hold on a GPU, buffer by buffer: the program that a device runs, run on sizes
//! only. It allocates what `cuda_device` allocates, in the same order, but for partial sums of a few rows.

mod exchange;
mod ledger;
mod run;

use std::convert::Infallible;
use std::rc::Rc;

use self::run::Run;
use super::pass::{self, Forward, Pass};
use super::program::{Block, Half};
use crate::plan::RoutedRows;
use crate::tensor::TensorId;
use crate::trace::AnyOp;

pub use ledger::{Ledger, Piece, Room};
pub use run::Rooms;

/// Forward of a micro-batch through a block whose attention is fused.
#[must_use]
pub fn forward(block: &Block, ledger: &Rc<Ledger>, input: Option<Room>) -> Forward<Room, Rooms> {
    let Ok(forward) = pass::forward(block, Run::new(block, ledger, None), input);
    forward
}

/// Backward of a micro-batch, or half of it.
pub fn backward(
    block: &Block,
    ledger: &Rc<Ledger>,
    saved: &mut Rooms,
    gradient: Option<Room>,
    half: Half,
) -> Option<Room> {
    let run = Run::new(block, ledger, Some(half));
    let Ok(gradient) = pass::backward(block, run, saved, gradient, half, &mut ());
    gradient
}

impl Pass for Run<'_> {
    type Tensor = Room;
    type Value = Room;
    type Route = Room;
    type Sink = ();
    type Error = Infallible;

    fn value(tensor: Room) -> Room {
        tensor
    }

    fn held(&mut self) -> &mut Rooms {
        &mut self.held
    }

    fn tensor(&self, id: TensorId) -> Result<&Room, Infallible> {
        Ok(self.get(id))
    }

    fn forward_op(&mut self, op: usize) -> Result<(), Infallible> {
        self.forward_kernels(op);
        Ok(())
    }

    fn forward_view(&mut self, view: usize) -> Result<(), Infallible> {
        self.make(self.block.trace.forward_views[view].to);
        Ok(())
    }

    fn backward_op(&mut self, op: usize, (): &mut ()) -> Result<(), Infallible> {
        self.backward_kernels(op);
        Ok(())
    }

    fn backward_view(&mut self, view: usize) -> Result<(), Infallible> {
        let to = self.block.trace.backward_views[view].to;
        if !self.held.values.contains_key(&self.block.storage(to)) {
            self.make(to);
        }
        Ok(())
    }

    fn ran(&self, _op: AnyOp<'_>) -> Result<(), Infallible> {
        Ok(())
    }

    fn routed(&self) -> Option<RoutedRows> {
        None
    }
}
