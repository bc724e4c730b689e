//! Parameters, gradients and optimizer states of a virtual stage on one rank, sharded by ZeRO level.
//!
//! All parameters of a kind are concatenated in a flat partition; rank `r` of a group of `d` owns the elements
//! `r·⌈N/d⌉ ..` of it, across tensor boundaries.

use std::collections::HashMap;
use std::ops::Range;

use catalog::Zero;

use super::block::{Block, BlockGradients, BlockParameters};
use super::buckets::{self, Bucket, Moving};
use super::device::{Device, FlatStates, Run};
use super::partition::{Partition, Sharing, StatesPlan, overlap};
use super::slot::{Kind, Slot};
use crate::tensor::TensorId;

/// Bytes of what exists for the whole step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StateBytes {
    /// Parameters in the type that kernels read.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights in fp32.
    pub master: u64,
    /// Both Adam moments.
    pub moments: u64,
}

impl std::ops::AddAssign for StateBytes {
    fn add_assign(&mut self, other: Self) {
        self.parameters += other.parameters;
        self.gradients += other.gradients;
        self.master += other.master;
        self.moments += other.moments;
    }
}

/// The states of a virtual stage on this rank.
pub struct States<D: Device> {
    /// The stage's parameters.
    pub slots: Vec<Slot>,
    pub(super) plan: StatesPlan,
    index: HashMap<(usize, TensorId), (usize, usize)>,
    values: Vec<Option<D::Tensor>>,
    pub(super) partitions: Vec<Partition<D>>,
    /// Exact mode: terms of gradients, by slot and use.
    pub(super) trees: Vec<Vec<D::Trees>>,
    /// Under ZeRO-2 and 3, gradients of the current micro-batch, by partition.
    pub(super) running: [Option<D::Flat>; 2],
    /// All-gathers of parameters under way, by partition.
    gathering: Vec<(usize, D::Moving)>,
    /// Gradient buckets, in the order in which backward completes them.
    pub(super) buckets: Vec<Bucket>,
    /// Buckets whose reduction is under way.
    pub(super) moving: Vec<Moving<D>>,
}

/// A rank's part of a slot: its elements within the slot, and their values.
pub type OwnPart<D> = (Range<usize>, <D as Device>::Parcel);

impl<D: Device> States<D> {
    /// The states at the beginning of training: a rank draws only the values that it owns.
    ///
    /// # Errors
    /// When the device fails or its memory is full; the same for all methods below.
    pub fn new(
        device: &D,
        slots: Vec<Slot>,
        sharing: [Sharing<D::Group>; 2],
        plan: StatesPlan,
    ) -> Result<Self, D::Error> {
        let index = slots
            .iter()
            .enumerate()
            .flat_map(|(s, slot)| {
                slot.uses
                    .iter()
                    .enumerate()
                    .map(move |(u, &key)| (key, (s, u)))
            })
            .collect();
        let partitions = [Kind::Dense, Kind::Expert]
            .into_iter()
            .zip(sharing)
            .map(|(kind, sharing)| Partition::new(device, (kind, sharing), &slots, plan))
            .collect::<Result<_, _>>()?;
        let trees = slots
            .iter()
            .map(|s| s.uses.iter().map(|_| D::Trees::default()).collect())
            .collect();
        let mut states = Self {
            values: vec![None; slots.len()],
            buckets: buckets::buckets(&slots, plan.bucket),
            moving: Vec::new(),
            slots,
            plan,
            index,
            partitions,
            trees,
            running: [None, None],
            gathering: Vec::new(),
        };
        states.take_values(device)?;
        Ok(states)
    }

    /// Size of the states.
    #[must_use]
    pub fn bytes(&self) -> StateBytes {
        let sum = |f: &dyn Fn(&Partition<D>) -> usize| {
            self.partitions.iter().map(f).sum::<usize>() as u64
        };
        let size = self.plan.dtype.size();
        StateBytes {
            parameters: size
                * sum(&|p| match &p.shard {
                    Some(shard) => D::elements(shard),
                    None => p.elements,
                }),
            gradients: 4 * sum(&|p| D::len(&p.gradient)),
            master: 4 * sum(&|p| D::len(&p.master)),
            moments: 4 * sum(&|p| D::len(&p.momentum) + D::len(&p.variance)),
        }
    }

    fn partition(&self, slot: &Slot) -> &Partition<D> {
        &self.partitions[slot.kind as usize]
    }

    /// Starts to gather the parameters, unless that is already under way.
    ///
    /// # Errors
    /// When the device fails or communication stops.
    pub fn prefetch(&mut self, device: &D) -> Result<(), D::Error> {
        if !self.gathering.is_empty() {
            return Ok(());
        }
        for (p, partition) in self.partitions.iter().enumerate() {
            if partition.elements == 0 || partition.is_whole() {
                continue;
            }
            let shard = match &partition.shard {
                Some(shard) => device.parcel(shard)?,
                None => device.parcel(&partition.rounded(device, self.plan.dtype)?)?,
            };
            let group = &partition.sharing.gather;
            let owned = |rank| partition.owned(rank).len();
            let lengths: Vec<usize> = (0..D::size(group)).map(owned).collect();
            let moving = device.all_gather(group, "parameters", shard, &lengths)?;
            self.gathering.push((p, moving));
        }
        Ok(())
    }

    /// Gathers the parameters that kernels read from the ranks that own them.
    ///
    /// # Errors
    /// When the device fails or communication stops.
    pub fn unshard(&mut self, device: &D) -> Result<(), D::Error> {
        self.prefetch(device)?;
        for (p, moving) in std::mem::take(&mut self.gathering) {
            let partition = &self.partitions[p];
            let whole = device.gathered(moving)?;
            for (slot, value) in self.slots.iter().zip(&mut self.values) {
                if slot.kind == partition.kind {
                    let range = slot.offset..slot.offset + slot.len;
                    *value = Some(device.taken(&whole, range, slot.shape(), self.plan.dtype)?);
                }
            }
        }
        Ok(())
    }

    /// Frees the gathered parameters.
    pub fn reshard(&mut self) {
        for (slot, value) in self.slots.iter().zip(&mut self.values) {
            if !self.partitions[slot.kind as usize].is_whole() {
                *value = None;
            }
        }
    }

    /// Copies parameters from the master weights that this rank holds whole.
    fn take_values(&mut self, device: &D) -> Result<(), D::Error> {
        for partition in self.partitions.iter().filter(|p| p.is_whole()) {
            for (slot, value) in self.slots.iter().zip(&mut self.values) {
                if slot.kind == partition.kind {
                    let range = slot.offset..slot.offset + slot.len;
                    let master = &partition.master;
                    *value = Some(device.rounded(master, range, slot.shape(), self.plan.dtype)?);
                }
            }
        }
        Ok(())
    }

    /// Parameters of one block.
    #[must_use]
    pub fn parameters(&self, block: usize) -> BlockParameters<'_, D::Tensor> {
        BlockParameters {
            index: &self.index,
            values: &self.values,
            block,
        }
    }

    /// Parameters and gradients of one block.
    pub fn block(&mut self, device: &D, block: usize) -> Result<Block<'_, D>, D::Error> {
        if self.plan.zero >= Zero::Z2 && !self.plan.exact {
            self.begin_running(device)?;
        }
        let parameters = BlockParameters {
            index: &self.index,
            values: &self.values,
            block,
        };
        let gradients = BlockGradients {
            index: &self.index,
            slots: &self.slots,
            partitions: &mut self.partitions,
            running: &mut self.running,
            trees: &mut self.trees,
            block,
        };
        Ok((parameters, gradients))
    }

    /// Allocates the gradients of the current micro-batch that must be reduced before they are added, if needed.
    pub(super) fn begin_running(&mut self, device: &D) -> Result<(), D::Error> {
        for (partition, running) in self.partitions.iter().zip(&mut self.running) {
            if running.is_none() && !partition.is_alone() {
                *running = Some(device.zeros(partition.elements)?);
            }
        }
        Ok(())
    }

    /// This rank's part of a slot's reduced gradient: its elements within the slot, and the values.
    pub fn own_gradient(&self, device: &D, slot: usize) -> Result<Option<OwnPart<D>>, D::Error> {
        let slot = &self.slots[slot];
        let partition = self.partition(slot);
        let Some(range) = overlap(&partition.own, slot) else {
            return Ok(None);
        };
        let place = partition.in_gradient(&range);
        let parcel = device.parcel_of(&partition.gradient, place)?;
        Ok(Some((
            range.start - slot.offset..range.end - slot.offset,
            parcel,
        )))
    }

    /// Adds another stage's gradient of a tied weight, from element `first` on, to this rank's part.
    pub fn add_tied(
        &mut self,
        device: &D,
        slot: usize,
        (first, other): (usize, &D::Flat),
    ) -> Result<(), D::Error> {
        let slot = &self.slots[slot];
        let partition = &mut self.partitions[slot.kind as usize];
        let Some(own) = overlap(&partition.own, slot) else {
            return Ok(());
        };
        let first = slot.offset + first;
        let start = own.start.max(first);
        let end = own.end.min(first + D::len(other));
        if start >= end {
            return Ok(());
        }
        let place = partition.in_gradient(&(start..end)).start;
        let terms = start - first..end - first;
        device.add(&mut partition.gradient, place, (other, terms))
    }

    /// Gradients that this rank, at index `tp` of its group, counts in the norm; not slot `skip`.
    pub fn measured(
        &self,
        tp: u64,
        skip: Option<usize>,
    ) -> impl Iterator<Item = (&D::Flat, Range<usize>)> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter(move |&(s, slot)| Some(s) != skip && self.speaks_for(slot, tp))
            .filter_map(|(_, slot)| {
                let partition = self.partition(slot);
                let range = overlap(&partition.own, slot)?;
                Some((&partition.gradient, partition.in_gradient(&range)))
            })
    }

    /// Runs the optimizer step and clears the gradients.
    pub fn step(&mut self, device: &D) -> Result<(), D::Error> {
        for partition in &mut self.partitions {
            let slots = self.slots.iter().enumerate();
            let runs: Vec<Run> = slots
                .filter(|(_, slot)| slot.kind == partition.kind)
                .filter_map(|(at, slot)| {
                    let range = overlap(&partition.own, slot)?;
                    Some(Run {
                        gradient_at: partition.in_gradient(&range).start,
                        range: range.start - partition.own.start..range.end - partition.own.start,
                        decays: slot.decay,
                        value: partition.is_whole().then_some(at),
                    })
                })
                .collect();
            let states = FlatStates {
                master: &mut partition.master,
                momentum: &mut partition.momentum,
                variance: &mut partition.variance,
                gradient: &partition.gradient,
                shard: partition.shard.as_mut(),
            };
            device.adamw(states, &runs, &mut self.values)?;
            device.clear(&mut partition.gradient)?;
        }
        self.reshard();
        Ok(())
    }

    /// The elements of a slot that this rank owns, and their position in its master weights and moments.
    #[must_use]
    pub fn own_part(&self, slot: &Slot) -> Option<(Range<usize>, Range<usize>)> {
        let own = &self.partition(slot).own;
        let range = overlap(own, slot)?;
        Some((
            range.start - slot.offset..range.end - slot.offset,
            range.start - own.start..range.end - own.start,
        ))
    }

    /// This rank's master weights, first and second moments of the parameters of a kind.
    #[must_use]
    pub fn own_states(&self, kind: Kind) -> [&D::Flat; 3] {
        let partition = &self.partitions[kind as usize];
        [&partition.master, &partition.momentum, &partition.variance]
    }

    /// The same, to be overwritten; call [`States::take_master`] afterwards.
    pub fn own_states_mut(&mut self, kind: Kind) -> [&mut D::Flat; 3] {
        let partition = &mut self.partitions[kind as usize];
        [
            &mut partition.master,
            &mut partition.momentum,
            &mut partition.variance,
        ]
    }

    /// Updates the parameters that kernels read after the master weights were overwritten.
    pub fn take_master(&mut self, device: &D) -> Result<(), D::Error> {
        for partition in self.partitions.iter_mut().filter(|p| p.shard.is_some()) {
            partition.shard = Some(partition.rounded(device, self.plan.dtype)?);
        }
        self.take_values(device)
    }

    /// Whether this rank, of tensor-parallel index `tp`, counts a slot in sums over all ranks.
    #[must_use]
    pub fn speaks_for(&self, slot: &Slot, tp: u64) -> bool {
        self.partition(slot).sharing.speaks
            && (tp == 0 || slot.kind == Kind::Expert || !slot.replicated_over_tp)
    }
}
