//! One block's view of its stage's states: parameters to read, gradients to add to.

use std::collections::{BTreeMap, HashMap};

use cpu_device::TreeSum;
use dtensor::TensorId;
use dtensor::block::Parameters;

use super::partition::Partition;
use crate::device::{Device, Gradients};
use crate::slots::Slot;

/// Both.
pub type Block<'s, D> = (
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

/// Where one block's gradients go.
pub struct BlockGradients<'s, D: Device> {
    pub(super) index: &'s HashMap<(usize, TensorId), (usize, usize)>,
    pub(super) slots: &'s [Slot],
    pub(super) partitions: &'s mut [Partition<D>],
    /// Of the running micro-batch, where they are apart from the sums.
    pub(super) running: &'s mut [Option<D::Flat>; 2],
    pub(super) trees: &'s mut [Vec<BTreeMap<usize, TreeSum>>],
    pub(super) block: usize,
}

impl<D: Device> Gradients<D> for BlockGradients<'_, D> {
    fn sum(&mut self, id: TensorId) -> (&mut D::Flat, &Slot) {
        let slot = &self.slots[self.index[&(self.block, id)].0];
        let kind = slot.kind as usize;
        let sum = self.running[kind].as_mut();
        (sum.unwrap_or(&mut self.partitions[kind].gradient), slot)
    }

    fn add_tree(&mut self, id: TensorId, start: usize, sum: TreeSum) {
        let (slot, u) = self.index[&(self.block, id)];
        self.trees[slot][u].entry(start).or_default().merge(sum);
    }
}
