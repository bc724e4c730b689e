//! Parameters, gradients and optimizer states of a virtual stage on one rank, sharded as ZeRO says.
//!
//! Parameters of a kind lie one after the other in a flat partition; rank `r` of a group of `d`
//! owns elements `r·⌈N/d⌉ ..` of it, whatever tensors they belong to.

mod block;
mod reduce;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use dtensor::comm::{Communicator, Group, Pending, pack, unpack};
use dtensor::cpu::{ExactSum, Numerics, Tensor, TreeSum, Weights};
use dtensor::{TensorId, comm};
use spec::{Bytes, DType, Zero};

pub use block::{BlockGradients, BlockParameters};
use reduce::{Bucket, Moving};

use crate::error::ExecutorError;
use crate::settings::AdamW;
use crate::slots::{Kind, Slot};

/// Who shares the states of a kind of parameters with this rank.
#[derive(Clone, Debug)]
pub struct Sharing {
    /// Ranks that each own a shard.
    pub shard: Group,
    /// Ranks that own the same shard.
    pub replicate: Group,
    /// Both together.
    pub all: Group,
    /// Both and the tensor-parallel ranks.
    pub all_with_tp: Group,
    /// Tensor-parallel ranks.
    pub tp: Group,
    /// Whether this rank speaks for its replicas in sums over all parameters.
    pub speaks: bool,
}

/// The flat states of one kind.
#[derive(Debug)]
struct Partition {
    kind: Kind,
    sharing: Sharing,
    /// Elements before sharding.
    elements: usize,
    /// Elements of the optimizer's states that this rank owns.
    own: Range<usize>,
    master: Vec<f32>,
    momentum: Vec<f32>,
    variance: Vec<f32>,
    /// Sums of gradients: of everything under ZeRO-0 and 1, of the own shard under 2 and 3.
    gradient: Vec<f32>,
    /// Under ZeRO-3, the own shard as kernels read it.
    shard: Option<Tensor>,
}

/// States of a virtual stage on this rank.
#[derive(Debug)]
pub struct States {
    /// Its parameters.
    pub slots: Vec<Slot>,
    zero: Zero,
    dtype: DType,
    numerics: Numerics,
    index: HashMap<(usize, TensorId), (usize, usize)>,
    values: Vec<Option<Tensor>>,
    partitions: Vec<Partition>,
    /// Exact mode: nodes per slot, use and first element.
    trees: Vec<Vec<BTreeMap<usize, TreeSum>>>,
    /// Under ZeRO-2 and 3, gradients of the running micro-batch, by partition.
    running: Vec<Vec<f32>>,
    /// Parameters under way, by partition.
    gathering: Vec<(usize, Pending)>,
    /// Gradients that travel together, in the order backward makes them.
    buckets: Vec<Bucket>,
    /// Those under way.
    moving: Vec<Moving>,
}

/// Channels of gathered parameters, by kind: apart from the gradients', which may come in between.
const PARAMETERS: [u64; 2] = [15, 25];

/// Bytes of what lives for the whole step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StateBytes {
    /// Parameters as kernels read them.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights.
    pub master: u64,
    /// Both moments.
    pub moments: u64,
}

impl States {
    /// States at the beginning of training: a rank draws only what it owns.
    #[must_use]
    pub fn new(
        slots: Vec<Slot>,
        sharing: [Sharing; 2],
        (zero, dtype, numerics): (Zero, DType, Numerics),
        bucket: Bytes,
        seed: u64,
    ) -> Self {
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
            .map(|(kind, sharing)| Partition::new(kind, sharing, &slots, (zero, dtype), seed))
            .collect();
        let trees = slots
            .iter()
            .map(|s| vec![BTreeMap::new(); s.uses.len()])
            .collect();
        let mut states = Self {
            values: vec![None; slots.len()],
            buckets: reduce::buckets(&slots, bucket),
            moving: Vec::new(),
            slots,
            zero,
            dtype,
            numerics,
            index,
            partitions,
            trees,
            running: vec![Vec::new(); 2],
            gathering: Vec::new(),
        };
        if zero == Zero::Z0 {
            states.take_values();
        }
        states
    }

    /// Bytes of the states.
    #[must_use]
    pub fn bytes(&self) -> StateBytes {
        let sum =
            |f: &dyn Fn(&Partition) -> usize| self.partitions.iter().map(f).sum::<usize>() as u64;
        let size = self.dtype.size();
        StateBytes {
            parameters: size
                * sum(&|p| match &p.shard {
                    Some(shard) => shard.len(),
                    None => p.elements,
                }),
            gradients: 4 * sum(&|p| p.gradient.len()),
            master: 4 * sum(&|p| p.master.len()),
            moments: 8 * sum(&|p| p.master.len()),
        }
    }

    fn partition(&self, slot: &Slot) -> &Partition {
        &self.partitions[slot.kind as usize]
    }

    /// Sends this rank's parameters to the ranks that will read them, if they are not under way.
    ///
    /// # Errors
    /// When communication stops.
    pub fn prefetch(&mut self, comm: &dyn Communicator) -> Result<(), ExecutorError> {
        if !self.gathering.is_empty() {
            return Ok(());
        }
        for (p, partition) in self.partitions.iter().enumerate() {
            if partition.elements == 0 {
                continue;
            }
            let shard = match &partition.shard {
                Some(shard) => shard.pack(),
                None => rounded(&partition.master, self.dtype).pack(),
            };
            let group = partition.sharing.shard.on(PARAMETERS[p]);
            let pending = group.all_gather(comm, "parameters", shard)?;
            self.gathering.push((p, pending));
        }
        Ok(())
    }

    /// Gathers the parameters that kernels read from their owners.
    ///
    /// # Errors
    /// When communication stops.
    pub fn unshard(&mut self, comm: &dyn Communicator) -> Result<(), ExecutorError> {
        self.prefetch(comm)?;
        for (p, pending) in std::mem::take(&mut self.gathering) {
            let partition = &self.partitions[p];
            let parts = pending.wait(comm)?;
            let size = self.dtype.size() as usize;
            for (slot, value) in self.slots.iter().zip(&mut self.values) {
                if slot.kind == partition.kind {
                    let wanted = slot.offset * size..(slot.offset + slot.len) * size;
                    let pieces = pieces(&parts, wanted);
                    *value = Some(Tensor::from_pieces(slot.shape(), pieces, self.dtype));
                }
            }
        }
        Ok(())
    }

    /// Frees the gathered parameters.
    pub fn reshard(&mut self) {
        self.values.fill(None);
    }

    /// Under ZeRO-0, takes the parameters from the master copy, which is whole.
    fn take_values(&mut self) {
        for p in 0..self.partitions.len() {
            let master = std::mem::take(&mut self.partitions[p].master);
            self.set_values(p, &master);
            self.partitions[p].master = master;
        }
    }

    fn set_values(&mut self, partition: usize, flat: &[f32]) {
        let kind = self.partitions[partition].kind;
        for (slot, value) in self.slots.iter().zip(&mut self.values) {
            if slot.kind == kind {
                let data = flat[slot.offset..slot.offset + slot.len].to_vec();
                *value = Some(Tensor::new(slot.shape(), data, self.dtype));
            }
        }
    }

    /// Parameters and gradients of one block.
    pub fn block(&mut self, block: usize) -> (BlockParameters<'_>, BlockGradients<'_>) {
        let parameters = BlockParameters {
            index: &self.index,
            values: &self.values,
            block,
        };
        let per_micro_batch = self.zero >= Zero::Z2;
        let gradients = BlockGradients {
            index: &self.index,
            slots: &self.slots,
            partitions: &mut self.partitions,
            running: &mut self.running,
            trees: &mut self.trees,
            per_micro_batch,
            block,
        };
        (parameters, gradients)
    }

    /// This rank's part of a slot's reduced gradient: first element in the slot, and the values.
    #[must_use]
    pub fn own_gradient(&self, slot: usize) -> (usize, &[f32]) {
        let slot = &self.slots[slot];
        let partition = self.partition(slot);
        match overlap(&partition.own, slot) {
            Some(range) => {
                let first = range.start - slot.offset;
                (first, &partition.gradient[partition.in_gradient(&range)])
            }
            None => (0, &[]),
        }
    }

    /// Adds another stage's gradient of a tied weight to this rank's part.
    pub fn add_tied(&mut self, slot: usize, other: &[f32]) {
        let slot = &self.slots[slot];
        let partition = &mut self.partitions[slot.kind as usize];
        let Some(range) = overlap(&partition.own, slot) else {
            return;
        };
        let place = partition.in_gradient(&range);
        let theirs = &other[range.start - slot.offset..range.end - slot.offset];
        for (g, o) in partition.gradient[place].iter_mut().zip(theirs) {
            *g += o;
        }
    }

    /// Adds the squares of the gradients this rank speaks for, but those of `skip`.
    pub fn add_squares(&self, sum: &mut ExactSum, tp: u64, skip: Option<usize>) {
        for (s, slot) in self.slots.iter().enumerate() {
            let partition = self.partition(slot);
            let speaks = partition.sharing.speaks
                && Some(s) != skip
                && (tp == 0 || slot.kind == Kind::Expert || !slot.replicated_over_tp);
            if !speaks {
                continue;
            }
            for &g in self.own_gradient(s).1 {
                sum.add(f64::from(g) * f64::from(g));
            }
        }
    }

    /// Takes a step, and clears the gradients.
    pub fn step(&mut self, optimizer: &AdamW, step: u64, rate: f64, scale: f32) {
        for slot in &self.slots {
            let partition = &mut self.partitions[slot.kind as usize];
            let Some(range) = overlap(&partition.own, slot) else {
                continue;
            };
            let local = range.start - partition.own.start..range.end - partition.own.start;
            let place = partition.in_gradient(&range);
            let mut weights = Weights {
                master: &mut partition.master[local.clone()],
                momentum: &mut partition.momentum[local.clone()],
                variance: &mut partition.variance[local],
                gradient: &partition.gradient[place],
            };
            optimizer.update(&mut weights, step, rate, scale, slot.decay);
        }
        for partition in &mut self.partitions {
            partition.gradient.fill(0.0);
            if partition.shard.is_some() {
                partition.shard = Some(rounded(&partition.master, self.dtype));
            }
        }
        match self.zero {
            Zero::Z0 => self.take_values(),
            _ => self.reshard(),
        }
    }

    /// Calls `piece` for every run of own elements that are consecutive in the model, with name,
    /// global shape, first global index, and where master, first and second moments lie.
    pub fn own_runs(&self, mut piece: impl FnMut(&Slot, String, u64, [&[f32]; 3])) {
        for slot in &self.slots {
            let partition = self.partition(slot);
            let Some(range) = overlap(&partition.own, slot) else {
                continue;
            };
            let in_slot = range.start - slot.offset..range.end - slot.offset;
            slot.runs(&in_slot, |expert, first, at| {
                let start = slot.offset + at.start - partition.own.start;
                let place = start..start + at.len();
                let states = [
                    &partition.master[place.clone()],
                    &partition.momentum[place.clone()],
                    &partition.variance[place],
                ];
                piece(slot, slot.name_of(expert), first, states);
            });
        }
    }

    /// Whether this rank speaks for a slot among ranks that hold the same elements.
    #[must_use]
    pub fn speaks_for(&self, slot: &Slot, tp: u64) -> bool {
        self.partition(slot).sharing.speaks
            && (tp == 0 || slot.kind == Kind::Expert || !slot.replicated_over_tp)
    }

    /// Sets own elements from a checkpoint: `fill(name, first global index, states)` writes master
    /// and moments of a run.
    ///
    /// # Errors
    /// What `fill` finds wrong.
    pub fn load(
        &mut self,
        mut fill: impl FnMut(&Slot, &str, u64, [&mut [f32]; 3]) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        for slot in &self.slots {
            let partition = &mut self.partitions[slot.kind as usize];
            let Some(range) = overlap(&partition.own, slot) else {
                continue;
            };
            let in_slot = range.start - slot.offset..range.end - slot.offset;
            let mut outcome = Ok(());
            slot.runs(&in_slot, |expert, first, at| {
                let start = slot.offset + at.start - partition.own.start;
                let place = start..start + at.len();
                let states = [
                    &mut partition.master[place.clone()],
                    &mut partition.momentum[place.clone()],
                    &mut partition.variance[place],
                ];
                if outcome.is_ok() {
                    outcome = fill(slot, &slot.name_of(expert), first, states);
                }
            });
            outcome?;
        }
        for partition in &mut self.partitions {
            if partition.shard.is_some() {
                partition.shard = Some(rounded(&partition.master, self.dtype));
            }
        }
        if self.zero == Zero::Z0 {
            self.take_values();
        }
        Ok(())
    }
}

impl Partition {
    fn new(
        kind: Kind,
        sharing: Sharing,
        slots: &[Slot],
        (zero, dtype): (Zero, DType),
        seed: u64,
    ) -> Self {
        let mine = || slots.iter().filter(|s| s.kind == kind);
        let elements = mine().map(|s| s.len).sum::<usize>();
        let chunk = elements.div_ceil(sharing.shard.size());
        let start = (chunk * sharing.shard.index).min(elements);
        let own = start..(start + chunk).min(elements);
        let mut master = Vec::with_capacity(own.len());
        for slot in mine() {
            let Some(range) = overlap(&own, slot) else {
                continue;
            };
            master.extend(slot.initial(seed, range.start - slot.offset..range.end - slot.offset));
        }
        let gradients = if zero >= Zero::Z2 {
            own.len()
        } else {
            elements
        };
        Self {
            kind,
            sharing,
            elements,
            momentum: vec![0.0; own.len()],
            variance: vec![0.0; own.len()],
            gradient: vec![0.0; gradients],
            shard: (zero == Zero::Z3).then(|| rounded(&master, dtype)),
            own,
            master,
        }
    }

    /// Where elements of the partition lie in the gradient.
    fn in_gradient(&self, range: &Range<usize>) -> Range<usize> {
        let base = if self.gradient.len() == self.elements {
            0
        } else {
            self.own.start
        };
        range.start - base..range.end - base
    }
}

/// A range of the bytes that messages hold after each other.
fn pieces(parts: &[comm::Message], wanted: Range<usize>) -> impl Iterator<Item = &[u8]> {
    let mut start = 0;
    parts.iter().filter_map(move |part| {
        let (first, end) = (start, start + part.len());
        start = end;
        let from = wanted.start.max(first);
        let to = wanted.end.min(end);
        (from < to).then(|| &part[from - first..to - first])
    })
}

/// What of a slot lies in a range of its partition, if anything.
fn overlap(own: &Range<usize>, slot: &Slot) -> Option<Range<usize>> {
    let start = own.start.max(slot.offset);
    let end = own.end.min(slot.offset + slot.len);
    (start < end).then_some(start..end)
}

fn rounded(values: &[f32], dtype: DType) -> Tensor {
    Tensor::new(vec![values.len()], values.to_vec(), dtype)
}

/// Values of a tied weight's gradient from the ranks that share it.
pub(crate) fn tied_message((first, values): (usize, &[f32])) -> comm::Message {
    let mut bytes = (first as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&pack(values));
    std::sync::Arc::new(bytes)
}

/// Puts what [`tied_message`] made where it belongs.
pub(crate) fn read_tied(bytes: &[u8], whole: &mut [f32]) {
    let (first, values) = bytes.split_at(8);
    let first = u64::from_le_bytes(first.try_into().expect("eight bytes")) as usize;
    let values = unpack(values);
    whole[first..first + values.len()].copy_from_slice(&values);
}
