//! Measures the operators of traced blocks as a rank of the executor runs them on the cpu device.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use catalog::DType;
use catalog::profile::Measured;
use comm::Group;
use comm::loopback::Loopback;
use cpu_device::{Context, GradientSink, Machine, MicroBatch, Numerics, Tensor, TreeSum};
use cpu_device::{Seen, Watch, WatchError};
use dtensor::block::{Block, Half, Keep, Parameters};
use dtensor::philox::Stream;
use dtensor::{BLOCK_AXES, BlockPosition, ParameterInfo, TensorId, TensorInfo, TensorRole, Trace};

use crate::ProfilerError;
use crate::lanes::{Effort, Laps, measure};

/// A block to measure.
#[derive(Clone, Debug)]
pub struct BlockRequest {
    /// The operators that one rank executes.
    pub trace: Trace,
    /// The rank's coordinates on the mesh.
    pub position: BlockPosition,
    /// Sequences per micro-batch.
    pub micro_batch: u64,
    /// Tokens per sequence, over all ranks.
    pub seq_len: u64,
    /// Size of the vocabulary.
    pub vocab: u64,
    /// Number of equal blocks whose forwards run one after another before the first backward, so that operands leave
    /// the caches as they do in training.
    pub depth: u64,
}

/// Measures every operator of a block on `ranks` ranks side by side, each with `threads` threads.
///
/// # Errors
/// When an operator has no kernel or returns numbers that are infinite or NaN.
pub fn blocks(
    request: &BlockRequest,
    ranks: u64,
    threads: usize,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let position = request.position;
    let make = |_: usize| Worker::new(request);
    measure(ranks, effort, make, |worker| {
        let timer = Timer::new(position);
        worker.run(&timer, threads)?;
        Ok(timer.laps())
    })
}

/// One rank with its blocks.
struct Worker<'r> {
    request: &'r BlockRequest,
    blocks: Vec<(Block, Held)>,
    comm: Loopback,
    ids: Vec<u32>,
}

/// Parameters and gradients of a block.
struct Held {
    parameters: HashMap<TensorId, Tensor>,
    gradients: HashMap<TensorId, Vec<f32>>,
}

impl<'r> Worker<'r> {
    fn new(request: &'r BlockRequest) -> Self {
        let trace = &request.trace;
        let blocks = (0..request.depth)
            .map(|_| {
                let block = Block::new(trace.clone(), "", None, Keep::All);
                (block, Held::new(trace, &request.position))
            })
            .collect();
        let ids = tokens(request);
        let world: u64 = BLOCK_AXES
            .iter()
            .map(|&axis| request.position.mesh.size(axis))
            .product();
        Self {
            request,
            blocks,
            comm: Loopback::new(0, world as usize),
            ids,
        }
    }

    /// Runs the forward of all blocks, then the backward of all.
    fn run(&mut self, timer: &Timer, threads: usize) -> Result<(), ProfilerError> {
        let request = self.request;
        let trace = &request.trace;
        let mut machine = alone(&self.comm, request.position, threads);
        machine.watch = Some(timer);
        let batch = micro_batch(request, &self.ids);
        let input = trace.tensors.iter().find(|t| t.role == TensorRole::Input);
        let mut kept = Vec::with_capacity(self.blocks.len());
        for (block, held) in &self.blocks {
            let context = Context {
                machine: &machine,
                batch: &batch,
                parameters: &Read(&held.parameters),
            };
            let input = input.map(random);
            timer.reset();
            let forward = cpu_device::forward(block, &context, input)?;
            check(&forward.output)?;
            kept.push(forward.saved);
        }
        for (block, held) in self.blocks.iter_mut().rev() {
            // The loss block takes no gradient: backward begins there.
            let gradient = match trace.output_gradient {
                Some(id) => random(trace.tensor(id)),
                None => Tensor::new(vec![0], Vec::new(), DType::F32),
            };
            let Held {
                parameters,
                gradients,
            } = held;
            let context = Context {
                machine: &machine,
                batch: &batch,
                parameters: &Read(parameters),
            };
            let mut saved = kept.pop().unwrap_or_default();
            timer.reset();
            let mut sink = Sink(gradients);
            let input = cpu_device::backward(
                block,
                &context,
                &mut saved,
                Some(gradient),
                Half::Both,
                &mut sink,
            )?;
            input.as_ref().map_or(Ok(()), check)?;
        }
        Ok(())
    }
}

/// Token ids of a micro-batch.
pub(crate) fn tokens(request: &BlockRequest) -> Vec<u32> {
    let tokens = request.micro_batch * request.seq_len / request.position.mesh.cp;
    let mut ids = vec![0.0; tokens as usize];
    Stream::new(1, 0, "ids").uniforms(0, &mut ids);
    let last = request.vocab as u32 - 1;
    let id = |u: f32| (f64::from(u) * request.vocab as f64) as u32;
    ids.into_iter().map(|u| id(u).min(last)).collect()
}

/// A micro-batch whose labels are its own tokens.
pub(crate) fn micro_batch<'t>(request: &BlockRequest, ids: &'t [u32]) -> MicroBatch<'t> {
    MicroBatch {
        ids,
        labels: ids,
        first_sequence: 0,
        seq_len: request.seq_len,
        step: 0,
        loss_scale: 1.0 / ids.len() as f32,
    }
}

/// Fails on infinite or NaN numbers, as left by skipped work or reads of unwritten memory.
pub(crate) fn check(x: &Tensor) -> Result<(), ProfilerError> {
    match x.f32().iter().find(|v| !v.is_finite()) {
        Some(&value) => Err(ProfilerError::NotFinite {
            kernel: "a block".to_owned(),
            value,
        }),
        None => Ok(()),
    }
}

/// A rank whose peers echo what it sends.
pub(crate) fn alone(comm: &Loopback, position: BlockPosition, threads: usize) -> Machine<'_> {
    Machine {
        comm,
        groups: groups(&position),
        position,
        numerics: Numerics::Fast,
        threads,
        seed: 1,
        watch: None,
    }
}

fn groups(position: &BlockPosition) -> [Group; 4] {
    [0, 1, 2, 3].map(|i| Group {
        ranks: (0..position.mesh.size(BLOCK_AXES[i]) as usize).collect(),
        index: position.at[i] as usize,
        channel: i as u64 + 1,
    })
}

fn random(info: &TensorInfo) -> Tensor {
    let shape: Vec<usize> = info.shape.iter().map(|&d| d as usize).collect();
    filled(shape, 0, info.dtype)
}

/// Values in [−½, ½), the magnitude that norms leave.
fn filled(shape: Vec<usize>, seed: u64, dtype: DType) -> Tensor {
    let mut data = vec![0.0; shape.iter().product()];
    Stream::new(seed, 0, "profile").uniforms(0, &mut data);
    data.iter_mut().for_each(|x| *x -= 0.5);
    Tensor::new(shape, data, dtype)
}

/// Shape of a parameter on this rank, with its experts as the first dim.
pub(crate) fn local_shape(
    trace: &Trace,
    parameter: &ParameterInfo,
    position: &BlockPosition,
) -> Vec<usize> {
    let info = trace.tensor(parameter.tensor);
    let experts = parameter
        .expert
        .then_some(parameter.experts.div_ceil(position.mesh.ep) as usize);
    let dims = position.all_indices(&info.global, &info.placements);
    experts
        .into_iter()
        .chain(dims.iter().map(Vec::len))
        .collect()
}

impl Held {
    fn new(trace: &Trace, position: &BlockPosition) -> Self {
        let mut held = Self {
            parameters: HashMap::new(),
            gradients: HashMap::new(),
        };
        for (seed, parameter) in (1u64..).zip(&trace.parameters) {
            let shape = local_shape(trace, parameter, position);
            let dtype = trace.tensor(parameter.tensor).dtype;
            let len = shape.iter().product();
            held.gradients.insert(parameter.tensor, vec![0.0; len]);
            held.parameters
                .insert(parameter.tensor, filled(shape, seed, dtype));
        }
        held
    }
}

struct Read<'h>(&'h HashMap<TensorId, Tensor>);

impl Parameters<Tensor> for Read<'_> {
    fn parameter(&self, id: TensorId) -> &Tensor {
        &self.0[&id]
    }
}

struct Sink<'h>(&'h mut HashMap<TensorId, Vec<f32>>);

impl GradientSink for Sink<'_> {
    fn plain(&mut self, id: TensorId) -> &mut [f32] {
        self.0
            .get_mut(&id)
            .expect("every parameter of the block has a gradient")
    }

    fn tree(&mut self, _id: TensorId, _range: Range<usize>, _sum: TreeSum) {}
}

/// Times each operator from the end of the one before to its own end, so that overhead between operators counts.
struct Timer {
    position: BlockPosition,
    state: Mutex<(Instant, Laps)>,
}

impl Timer {
    fn new(position: BlockPosition) -> Self {
        Self {
            position,
            state: Mutex::new((Instant::now(), Laps::new())),
        }
    }

    fn reset(&self) {
        self.state.lock().expect("one rank, one thread").0 = Instant::now();
    }

    fn laps(self) -> Laps {
        self.state.into_inner().expect("one rank, one thread").1
    }
}

impl Watch for Timer {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        let now = Instant::now();
        let mut state = self.state.lock().expect("one rank, one thread");
        let mesh = self.position.mesh;
        let kernel = seen.block.trace.kernel(seen.op, |axis| mesh.size(axis));
        let lap = (now - state.0).as_secs_f64();
        let sum = state.1.entry(kernel).or_default();
        sum.0 += lap;
        sum.1 += 1;
        state.0 = Instant::now();
        Ok(())
    }
}
