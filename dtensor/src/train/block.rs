//! One block's view of its virtual stage's states: parameters to read, gradients to add to.

use std::collections::HashMap;

use super::device::{Device, Gradients};
use super::partition::Partition;
use super::slot::Slot;
use crate::block::Parameters;
use crate::tensor::TensorId;

/// A block's parameters, and where its gradients go.
pub(super) type Block<'s, D> = (
    BlockParameters<'s, <D as Device>::Tensor>,
    BlockGradients<'s, D>,
);

/// Parameters as one block's kernels read them.
pub struct BlockParameters<'s, T> {
    pub(super) index: &'s HashMap<(usize, TensorId), (usize, usize)>,
    pub(super) values: &'s [Option<T>],
    pub(super) block: usize,
}

impl<T> Parameters<T> for BlockParameters<'_, T> {
    fn parameter(&self, id: TensorId) -> &T {
        let (slot, _) = self.index[&(self.block, id)];
        self.values[slot]
            .as_ref()
            .expect("the program gathers a stage's parameters before its passes")
    }
}

/// The destination of one block's gradients.
pub struct BlockGradients<'s, D: Device> {
    pub(super) index: &'s HashMap<(usize, TensorId), (usize, usize)>,
    pub(super) slots: &'s [Slot],
    pub(super) partitions: &'s mut [Partition<D>],
    /// Gradients of the current micro-batch per partition, where they are kept apart from the sums.
    pub(super) running: &'s mut [Option<D::Flat>; 2],
    pub(super) trees: &'s mut [Vec<D::Trees>],
    pub(super) block: usize,
}

impl<D: Device> Gradients<D> for BlockGradients<'_, D> {
    fn sum(&mut self, id: TensorId) -> (&mut D::Flat, &Slot) {
        let slot = &self.slots[self.index[&(self.block, id)].0];
        let kind = slot.kind as usize;
        let sum = self.running[kind].as_mut();
        (sum.unwrap_or(&mut self.partitions[kind].gradient), slot)
    }

    fn trees(&mut self, id: TensorId) -> &mut D::Trees {
        let (slot, u) = self.index[&(self.block, id)];
        &mut self.trees[slot][u]
    }
}
