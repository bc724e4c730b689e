//! The CPU device: ranks compute on the processor's cores.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use catalog::{DType, Precision};
use comm::{CommError, Group, Message, Pending, pack, unpack};
use cpu_device::Watch;
use cpu_device::{
    self, AdamWStep, Context, ExactSum, GradientSink, Machine, MicroBatch, Saved, Tensor, TreeSum,
};
use dtensor::TensorId;
use dtensor::block::{Attention, Block, Forward, Parameters};
use dtensor::train::{self, FlatStates, Gradients, Passing, Run};

use super::interface::{Device, Devices};
use crate::error::ExecutorError;
use crate::settings::AdamW;

/// The processor's cores, divided among ranks.
#[derive(Clone, Copy, Debug)]
pub struct Cores {
    /// Threads that each rank's kernels may use.
    pub threads: usize,
}

impl Cores {
    /// This machine's cores, divided among `ranks` ranks.
    #[must_use]
    pub fn among(ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            threads: (cores / ranks.max(1)).max(1),
        }
    }
}

impl Devices for Cores {
    type Device<'c> = Cpu<'c>;

    fn open<'c>(&self, host: Machine<'c>) -> Result<Cpu<'c>, ExecutorError> {
        Ok(Cpu {
            machine: Machine {
                threads: self.threads,
                ..host
            },
            marks: RefCell::default(),
            numbers: Cell::default(),
            squares: RefCell::default(),
            scale: Cell::new(1.0),
        })
    }
}

const NO_CAPTURE: ExecutorError = ExecutorError::Capture {
    reason: "the cpu device has no captured steps",
};

/// One rank on its share of the cores.
pub struct Cpu<'c> {
    machine: Machine<'c>,
    marks: RefCell<Vec<Instant>>,
    /// The AdamW constants of the current step.
    numbers: Cell<Option<AdamWStep>>,
    /// This rank's sum of squared gradients measured last, and the factor that clipping multiplies gradients by.
    squares: RefCell<ExactSum>,
    scale: Cell<f32>,
}

impl Cpu<'_> {
    /// Merges the gradient trees of all members.
    fn all_trees(
        &self,
        group: &Group,
        mut trees: BTreeMap<usize, TreeSum>,
    ) -> Result<BTreeMap<usize, TreeSum>, ExecutorError> {
        if group.size() == 1 {
            return Ok(trees);
        }
        let mut bytes = Vec::new();
        for (start, tree) in &trees {
            bytes.extend((*start as u64).to_le_bytes());
            tree.write(&mut bytes);
        }
        let arrived = group.all_gather(self.machine.comm, "gradients", Arc::new(bytes))?;
        let arrived = arrived.wait(self.machine.comm)?;
        for (index, bytes) in arrived.iter().enumerate() {
            if index == group.index {
                continue;
            }
            let mut bytes = bytes.as_slice();
            while !bytes.is_empty() {
                let (start, rest) = bytes.split_at(8);
                let start = u64::from_le_bytes(start.try_into().expect("eight bytes")) as usize;
                bytes = trees.entry(start).or_default().read(rest);
            }
        }
        Ok(trees)
    }
}

/// The bytes in range `wanted` of the concatenated messages, as one slice per message.
fn pieces(parts: &[Message], wanted: Range<usize>) -> impl Iterator<Item = &[u8]> {
    let mut start = 0;
    parts.iter().filter_map(move |part| {
        let (first, end) = (start, start + part.len());
        start = end;
        let from = wanted.start.max(first);
        let to = wanted.end.min(end);
        (from < to).then(|| &part[from - first..to - first])
    })
}

impl train::Device for Cpu<'_> {
    type Tensor = Tensor;
    type Flat = Vec<f32>;
    type Parcel = Message;
    type Sending = ();
    type Moving = Pending;
    type Whole = Vec<Message>;
    type Saved = Saved;
    type Batch<'b> = MicroBatch<'b>;
    type Group = Group;
    type Trees = BTreeMap<usize, TreeSum>;
    type Error = ExecutorError;

    fn size(group: &Group) -> usize {
        group.size()
    }

    fn index(group: &Group) -> usize {
        group.index
    }

    fn forward(
        &self,
        block: &Block,
        batch: &MicroBatch<'_>,
        parameters: &dyn Parameters<Tensor>,
        input: Option<Tensor>,
    ) -> Result<Forward<Tensor, Saved>, ExecutorError> {
        let context = Context {
            machine: &self.machine,
            batch,
            parameters,
        };
        Ok(cpu_device::forward(block, &context, input)?)
    }

    fn backward(
        &self,
        block: &Block,
        batch: &MicroBatch<'_>,
        parameters: &dyn Parameters<Tensor>,
        passing: Passing<'_, Self>,
        gradients: &mut dyn Gradients<Self>,
    ) -> Result<Option<Tensor>, ExecutorError> {
        let context = Context {
            machine: &self.machine,
            batch,
            parameters,
        };
        Ok(cpu_device::backward(
            block,
            &context,
            passing.saved,
            passing.gradient,
            passing.half,
            &mut Sink(gradients),
        )?)
    }

    fn saved_bytes(saved: &Saved) -> u64 {
        cpu_device::kept_bytes(saved)
    }

    fn elements(tensor: &Tensor) -> usize {
        tensor.shape.iter().product()
    }

    fn flat(&self, _: usize, draw: &dyn Fn() -> Vec<f32>) -> Result<Vec<f32>, ExecutorError> {
        Ok(draw())
    }

    fn zeros(&self, len: usize) -> Result<Vec<f32>, ExecutorError> {
        Ok(vec![0.0; len])
    }

    fn len(flat: &Vec<f32>) -> usize {
        flat.len()
    }

    fn clear(&self, flat: &mut Vec<f32>) -> Result<(), ExecutorError> {
        flat.fill(0.0);
        Ok(())
    }

    fn put(&self, flat: &mut Vec<f32>, at: usize, from: &Vec<f32>) -> Result<(), ExecutorError> {
        self.write(flat, at, from)
    }

    fn add(
        &self,
        flat: &mut Vec<f32>,
        at: usize,
        (terms, range): (&Vec<f32>, Range<usize>),
    ) -> Result<(), ExecutorError> {
        cpu_device::add(&mut flat[at..], &terms[range]);
        Ok(())
    }

    fn rounded(
        &self,
        flat: &Vec<f32>,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Tensor, ExecutorError> {
        Ok(Tensor::new(shape, flat[range].to_vec(), dtype))
    }

    fn put_tensor(
        &self,
        flat: &mut Vec<f32>,
        at: usize,
        tensor: &Tensor,
    ) -> Result<(), ExecutorError> {
        self.write(flat, at, &tensor.f32())
    }

    fn adamw(
        &self,
        states: FlatStates<'_, Self>,
        runs: &[Run],
        values: &mut [Option<Tensor>],
    ) -> Result<(), ExecutorError> {
        let (numbers, scale) = (self.numbers.get(), self.scale.get());
        let numbers = numbers.expect("a step's numbers are set before its actions");
        if scale.is_nan() {
            return Ok(());
        }
        for run in runs {
            let (range, from) = (run.range.clone(), run.gradient_at);
            let mut weights = cpu_device::Weights {
                master: &mut states.master[range.clone()],
                momentum: &mut states.momentum[range.clone()],
                variance: &mut states.variance[range.clone()],
                gradient: &states.gradient[from..from + range.len()],
            };
            let keep = if run.decays { numbers.keep } else { 1.0 };
            cpu_device::adamw(&mut weights, &AdamWStep { keep, ..numbers }, scale);
            if let Some(value) = run.value.and_then(|at| values[at].as_mut()) {
                let (shape, dtype) = (value.shape.clone(), value.dtype());
                *value = Tensor::new(shape, states.master[range].to_vec(), dtype);
            }
        }
        if let Some(shard) = states.shard {
            let (shape, dtype) = (shard.shape.clone(), shard.dtype());
            *shard = Tensor::new(shape, states.master.clone(), dtype);
        }
        Ok(())
    }

    fn parcel(&self, tensor: &Tensor) -> Result<Message, ExecutorError> {
        Ok(tensor.pack())
    }

    fn parcel_of(&self, flat: &Vec<f32>, range: Range<usize>) -> Result<Message, ExecutorError> {
        Ok(pack(&flat[range]))
    }

    fn send(
        &self,
        to: usize,
        channel: u64,
        what: &str,
        parcel: &Message,
    ) -> Result<(), ExecutorError> {
        let comm = self.machine.comm;
        Ok(comm.send(to, channel, what, Message::clone(parcel))?)
    }

    fn sent(&self, (): ()) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn receive(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        (shape, dtype): (Vec<usize>, DType),
    ) -> Result<Tensor, ExecutorError> {
        let bytes = self.machine.comm.receive(from, channel, what)?;
        let expected = shape.iter().product::<usize>() * dtype.size() as usize;
        CommError::check_size(
            [self.machine.comm.rank(), from],
            what,
            bytes.len(),
            expected,
        )?;
        Ok(Tensor::unpack(shape, &bytes, dtype))
    }

    fn all_gather(
        &self,
        group: &Group,
        what: &str,
        own: Message,
        _: &[usize],
    ) -> Result<Pending, ExecutorError> {
        Ok(group.all_gather(self.machine.comm, what, own)?)
    }

    fn gathered(&self, moving: Pending) -> Result<Vec<Message>, ExecutorError> {
        Ok(moving.wait(self.machine.comm)?)
    }

    fn taken(
        &self,
        whole: &Vec<Message>,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Tensor, ExecutorError> {
        let size = dtype.size() as usize;
        let pieces = pieces(whole, range.start * size..range.end * size);
        Ok(Tensor::from_pieces(shape, pieces, dtype))
    }

    fn put_whole(
        &self,
        flat: &mut Vec<f32>,
        at: usize,
        whole: &Vec<Message>,
    ) -> Result<(), ExecutorError> {
        let mut at = at;
        for part in whole {
            let part = unpack(part);
            self.write(flat, at, &part)?;
            at += part.len();
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        group: &Group,
        what: &str,
        parts: Vec<Message>,
    ) -> Result<Pending, ExecutorError> {
        Ok(group.all_to_all(self.machine.comm, what, parts)?)
    }

    fn reduced(
        &self,
        group: &Group,
        what: &str,
        moving: Pending,
    ) -> Result<Vec<f32>, ExecutorError> {
        let comm = self.machine.comm;
        Ok(group.sum(comm, what, &moving.wait(comm)?)?)
    }

    fn all_reduce(
        &self,
        group: &Group,
        what: &str,
        flat: &mut Vec<f32>,
        runs: &[Range<usize>],
    ) -> Result<(), ExecutorError> {
        let mut terms = Vec::with_capacity(runs.iter().map(Range::len).sum());
        for run in runs {
            terms.extend_from_slice(&flat[run.clone()]);
        }
        group.all_reduce(self.machine.comm, what, &mut terms)?;
        let mut sums = terms.as_slice();
        for run in runs {
            let (here, rest) = sums.split_at(run.len());
            self.write(flat, run.start, here)?;
            sums = rest;
        }
        Ok(())
    }

    fn sum_trees(
        &self,
        group: &Group,
        uses: Vec<BTreeMap<usize, TreeSum>>,
        own: Range<usize>,
        (flat, at): (&mut Vec<f32>, usize),
    ) -> Result<(), ExecutorError> {
        let mut sums = vec![0.0; own.len()];
        for (u, trees) in uses.into_iter().enumerate() {
            for (start, tree) in self.all_trees(group, trees)? {
                let Some(root) = tree.root() else { continue };
                let here = root
                    .into_iter()
                    .zip(start..)
                    .filter(|(_, at)| own.contains(at));
                for (x, at) in here {
                    let sum = &mut sums[at - own.start];
                    // Each use of a tied weight is summed completely before the uses are added.
                    *sum = if u == 0 { x } else { *sum + x };
                }
            }
        }
        self.write(flat, at, &sums)
    }
}

impl Device for Cpu<'_> {
    type Captured = Infallible;
    const NAME: &'static str = "cpu";
    const PRECISIONS: &'static [Precision] = &[Precision::Fp32, Precision::Bf16];
    const ATTENTION: Attention = Attention::Pieces;

    fn set_watch(&mut self, watch: &'static dyn Watch) {
        self.machine.watch = Some(watch);
    }

    fn batch<'b>(
        &self,
        _micro_batch: u32,
        batch: MicroBatch<'b>,
    ) -> Result<MicroBatch<'b>, ExecutorError> {
        Ok(batch)
    }

    fn read<'f>(
        &self,
        flat: &'f Vec<f32>,
        range: Range<usize>,
    ) -> Result<Cow<'f, [f32]>, ExecutorError> {
        Ok(Cow::Borrowed(&flat[range]))
    }

    fn write(&self, flat: &mut Vec<f32>, at: usize, values: &[f32]) -> Result<(), ExecutorError> {
        flat[at..at + values.len()].copy_from_slice(values);
        Ok(())
    }

    fn set_numbers(&self, step: &AdamWStep) -> Result<(), ExecutorError> {
        self.numbers.set(Some(*step));
        Ok(())
    }

    fn measure_and_clip(
        &self,
        gradients: &[(&Vec<f32>, Range<usize>)],
        losses: Option<&Vec<f32>>,
        optimizer: &AdamW,
    ) -> Result<(), ExecutorError> {
        let mut sum = ExactSum::default();
        for (flat, range) in gradients {
            for &x in &flat[range.clone()] {
                sum.add(f64::from(x) * f64::from(x));
            }
        }
        let finite = losses.is_none_or(|losses| losses.iter().all(|x| x.is_finite()));
        let norm = sum.value().sqrt();
        self.scale.set(match finite {
            true => optimizer.scale(norm),
            false => f32::NAN,
        });
        *self.squares.borrow_mut() = sum;
        Ok(())
    }

    fn squares(&self) -> Result<ExactSum, ExecutorError> {
        Ok(self.squares.borrow().clone())
    }

    fn set_scale(&self, scale: f32) -> Result<(), ExecutorError> {
        self.scale.set(scale);
        Ok(())
    }

    fn receive_flat(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        len: usize,
    ) -> Result<Vec<f32>, ExecutorError> {
        let bytes = self.machine.comm.receive(from, channel, what)?;
        CommError::check_size([self.machine.comm.rank(), from], what, bytes.len(), 4 * len)?;
        Ok(unpack(&bytes))
    }

    fn captures(&self) -> Result<(), &'static str> {
        Err("the cpu device queues no work")
    }

    fn begin_capture(&self) -> Result<(), ExecutorError> {
        Err(NO_CAPTURE)
    }

    fn end_capture(&self) -> Result<Infallible, ExecutorError> {
        Err(NO_CAPTURE)
    }

    fn replay(&self, captured: &Infallible) -> Result<(), ExecutorError> {
        match *captured {}
    }

    fn mark(&self) -> Result<(), ExecutorError> {
        self.marks.borrow_mut().push(Instant::now());
        Ok(())
    }

    fn laps(&self) -> Result<Vec<f64>, ExecutorError> {
        let marks = std::mem::take(&mut *self.marks.borrow_mut());
        let lap = |pair: &[Instant]| (pair[1] - pair[0]).as_secs_f64();
        Ok(marks.windows(2).map(lap).collect())
    }
}

/// The gradients' destination in the form that the CPU kernels expect.
struct Sink<'g, 'c>(&'g mut dyn Gradients<Cpu<'c>>);

impl GradientSink for Sink<'_, '_> {
    fn plain(&mut self, id: TensorId) -> &mut [f32] {
        let (flat, slot) = self.0.sum(id);
        &mut flat[slot.offset..slot.offset + slot.len]
    }

    fn tree(&mut self, id: TensorId, range: Range<usize>, sum: TreeSum) {
        let trees = self.0.trees(id);
        trees.entry(range.start).or_default().merge(sum);
    }
}
