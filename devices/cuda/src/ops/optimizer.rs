//! The optimizer: gradient norm, clipping and AdamW, each one launch over all weights. The host never waits: it writes
//! a step's hyperparameters beforehand, and the clipping factor stays on the device.

use std::cell::RefCell;
use std::collections::BTreeMap;

use bytemuck::Pod;

use super::grid::{THREADS, WAVES};
use crate::error::CudaError;
use crate::kernels::{Kernel, Source};
use crate::launcher::{Address, Arguments, NumbersArgument, WeightsArgument};
use crate::memory::Buffer;
use crate::tensor::{Device, Tensor};
use cpu_device::AdamWStep;

/// Blocks of `square_sum` that fill an SM with threads.
const AT_ONCE: u32 = 8;
/// Elements that a block processes at a time.
const CHUNK: usize = 2048;
/// Bytes of `struct Norm` of `reduce.cu`, and the offset of its factor.
const NORM: u64 = 16;
const SCALE: u64 = 8;

/// Hyperparameters of a step: `struct Step` of `reduce.cu`.
type Step = [f32; 7];

/// A contiguous run of weights with their states, all in 32 bits.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Master weights, first moments, second moments and gradient.
    pub states: [Tensor; 4],
    /// Copy of the weights that other kernels read, written after each step.
    pub rounded: Option<Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
}

/// The optimizer's buffers on a device.
pub struct Optimizer {
    device: Device,
    /// Square of the gradient norm, and the clipping factor.
    norm: Buffer,
    /// Hyperparameters of the step.
    numbers: Buffer,
    /// Sums of squares by block.
    partial: Buffer,
    /// Tables of runs that kernels read, by an address that identifies each. They are rewritten only when they change.
    tables: RefCell<BTreeMap<Address, Table>>,
}

struct Table {
    words: Vec<u8>,
    buffer: Buffer,
}

impl Optimizer {
    /// Allocates the optimizer's buffers on a device.
    ///
    /// # Errors
    /// When its memory is full.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let blocks = u64::from(AT_ONCE * device.launcher.multiprocessors());
        Ok(Self {
            norm: device.memory.allocate(NORM)?,
            numbers: device.memory.allocate(size_of::<Step>() as u64)?,
            partial: device.memory.allocate(8 * blocks)?,
            tables: RefCell::default(),
            device: device.clone(),
        })
    }

    /// Sets the hyperparameters of the next [`Optimizer::step`].
    ///
    /// # Errors
    /// When the device fails.
    pub fn set_numbers(&self, step: &AdamWStep) -> Result<(), CudaError> {
        let ([beta1, beta2], [correction1, correction2]) = (step.betas, step.corrections);
        let (rate, epsilon, keep) = (step.rate, step.epsilon, step.keep);
        let numbers: Step = [rate, beta1, beta2, correction1, correction2, epsilon, keep];
        let launcher = &self.device.launcher;
        launcher.write(self.numbers.address, bytemuck::bytes_of(&numbers))
    }

    /// Sums the squares of gradients in 64 bits and a fixed order, and sets the factor that clips the norm to `limit`.
    /// Where a gradient, or a number of `finite`, is infinite or NaN, the next step changes nothing.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn measure_and_clip(
        &self,
        gradients: &[Tensor],
        finite: &[Tensor],
        limit: Option<f64>,
    ) -> Result<(), CudaError> {
        let counted = gradients.iter().map(|x| (x, 1));
        let mut chunks = 0;
        let runs: Vec<NumbersArgument> = counted
            .chain(finite.iter().map(|x| (x, 0)))
            .filter(|(x, _)| !x.is_empty())
            .map(|(x, counts)| NumbersArgument {
                address: x.address(),
                count: x.len() as i64,
                first: claim(&mut chunks, x.len()),
                counts,
            })
            .collect();
        let table = self.table(self.norm.address, &runs)?;
        let blocks = self.partial.bytes / 8;
        let arguments = Arguments::of(&[&self.partial, &table])
            .sizes([runs.len()])
            .with(chunks);
        let plain = |name| Kernel::plain(Source::Reduce, name);
        let grid = [blocks as u32, 1, 1];
        self.device
            .blocks(plain("square_sum"), grid, THREADS, 0, arguments)?;
        let arguments = Arguments::of(&[&self.norm, &self.partial])
            .with(blocks as i64)
            .with(limit.unwrap_or(f64::INFINITY));
        self.device
            .blocks(plain("clip"), [1, 1, 1], THREADS, 0, arguments)
    }

    /// The sum of squares from the last [`Optimizer::measure_and_clip`]. Waits for the device.
    ///
    /// # Errors
    /// When earlier work failed.
    pub fn squares(&self) -> Result<f64, CudaError> {
        let mut squares = 0.0;
        let bytes = bytemuck::bytes_of_mut(&mut squares);
        self.device.launcher.read(self.norm.address, bytes)?;
        Ok(squares)
    }

    /// Sets the clipping factor, where the norm includes other ranks' gradients.
    ///
    /// # Errors
    /// When the device fails.
    pub fn set_scale(&self, scale: f32) -> Result<(), CudaError> {
        let to = self.norm.address + SCALE;
        let launcher = &self.device.launcher;
        launcher.write(to, bytemuck::bytes_of(&scale))
    }

    /// One step of AdamW over runs of weights.
    ///
    /// # Errors
    /// When memory or the device fails.
    pub fn step(&self, weights: &[Weights]) -> Result<(), CudaError> {
        let mut chunks = 0;
        let runs: Vec<WeightsArgument> = weights
            .iter()
            .filter(|run| !run.states[0].is_empty())
            .map(|run| WeightsArgument {
                states: run.states.each_ref().map(Tensor::address),
                weights: run.rounded.as_ref().map_or(0, Tensor::address),
                count: run.states[0].len() as i64,
                first: claim(&mut chunks, run.states[0].len()),
                is_bf16: i32::from(run.rounded.as_ref().is_some_and(Tensor::is_bf16)),
                decays: i32::from(run.decays),
            })
            .collect();
        let Some(first) = runs.first() else {
            return Ok(());
        };
        let table = self.table(first.states[0], &runs)?;
        let arguments = Arguments::of(&[&table])
            .sizes([runs.len()])
            .with(chunks)
            .with(self.numbers.address)
            .with(self.norm.address);
        let most = i64::from(self.device.launcher.multiprocessors() * WAVES);
        let grid = [chunks.min(most) as u32, 1, 1];
        let kernel = Kernel::plain(Source::Reduce, "adamw");
        self.device.blocks(kernel, grid, THREADS, 0, arguments)
    }

    /// The table on the device under this key, rewritten if it differs from last time.
    fn table<R: Pod>(&self, key: Address, runs: &[R]) -> Result<Address, CudaError> {
        let words: &[u8] = bytemuck::cast_slice(runs);
        let mut tables = self.tables.borrow_mut();
        if let Some(known) = tables.get(&key).filter(|known| known.words == words) {
            return Ok(known.buffer.address);
        }
        let buffer = self.device.memory.allocate(words.len() as u64)?;
        self.device.launcher.write(buffer.address, words)?;
        let address = buffer.address;
        let table = Table {
            words: words.to_vec(),
            buffer,
        };
        tables.insert(key, table);
        Ok(address)
    }
}

/// First chunk of a run of this many elements, after the chunks of the runs before it.
fn claim(chunks: &mut i64, elements: usize) -> i64 {
    let first = *chunks;
    *chunks += elements.div_ceil(CHUNK) as i64;
    first
}
