//! One block's view of its stage's states: parameters to read, gradients to add to.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use dtensor::TensorId;
use dtensor::cpu::{GradientSink, Parameters, Tensor, TreeSum};

use super::Partition;
use crate::slots::Slot;

/// Parameters as one block's kernels read them.
pub struct BlockParameters<'s> {
    pub(super) index: &'s HashMap<(usize, TensorId), (usize, usize)>,
    pub(super) values: &'s [Option<Tensor>],
    pub(super) block: usize,
}

impl Parameters for BlockParameters<'_> {
    fn parameter(&self, id: TensorId) -> &Tensor {
        let (slot, _) = self.index[&(self.block, id)];
        self.values[slot]
            .as_ref()
            .expect("the program gathers a stage's parameters before its passes")
    }
}

/// Where one block's gradients go.
pub struct BlockGradients<'s> {
    pub(super) index: &'s HashMap<(usize, TensorId), (usize, usize)>,
    pub(super) slots: &'s [Slot],
    pub(super) partitions: &'s mut [Partition],
    pub(super) running: &'s mut [Vec<f32>],
    pub(super) trees: &'s mut [Vec<BTreeMap<usize, TreeSum>>],
    pub(super) per_micro_batch: bool,
    pub(super) block: usize,
}

impl GradientSink for BlockGradients<'_> {
    fn plain(&mut self, id: TensorId) -> &mut [f32] {
        let slot = &self.slots[self.index[&(self.block, id)].0];
        let partition = &mut self.partitions[slot.kind as usize];
        let buffer = if self.per_micro_batch {
            let running = &mut self.running[slot.kind as usize];
            running.resize(partition.elements, 0.0);
            running
        } else {
            &mut partition.gradient
        };
        &mut buffer[slot.offset..slot.offset + slot.len]
    }

    fn tree(&mut self, id: TensorId, range: Range<usize>, sum: TreeSum) {
        let (slot, u) = self.index[&(self.block, id)];
        self.trees[slot][u]
            .entry(range.start)
            .or_default()
            .merge(sum);
    }
}
