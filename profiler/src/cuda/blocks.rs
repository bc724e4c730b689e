//! Measures the operators of traced blocks as a rank runs them, one after the other in one stream.
//!
//! The time of fused operators counts with the first of them; the others take none. Peers are echoes: a rank's compute
//! is measured at its own shapes, but of its exchanges only the packing, because messages are measured between GPUs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use catalog::DType;
use catalog::profile::{Kernel, Measured};
use comm::loopback::Loopback;
use cpu_device::{Seen, Watch, WatchError};
use cuda_device::{
    self, Batch, Context, CudaError, Device, EchoLinks, GradientSink, Machine, Tensor,
};
use dtensor::block::{Attention, Block, Half, Keep, Parameters};
use dtensor::{
    BLOCK_AXES, BlockMesh, CostClass, Epilogues, TensorId, TensorInfo, TensorRole, Trace,
};

use super::operands::Tiled;
use super::timing::{NOTHING, repeat};
use crate::ProfilerError;
use crate::blocks::{BlockRequest, alone, check, local_shape, micro_batch, tokens};
use crate::lanes::{Effort, Laps};

/// Number of measurements of the time between two events without work between them.
const EMPTY_LAPS: usize = 101;

/// The operators of a block.
pub(super) fn kernels(request: &BlockRequest) -> Vec<Kernel> {
    let trace = &request.trace;
    let mesh = request.position.mesh;
    let epilogues = Epilogues::of(trace);
    let kernels = trace
        .ops()
        .map(|op| trace.kernel_on_gpu(op, &epilogues, |axis| mesh.size(axis)));
    let mut kernels: Vec<Kernel> = kernels.collect();
    kernels.sort();
    kernels.dedup();
    kernels
}

/// Measures every operator of a block of one rank.
///
/// # Errors
/// When memory or the device fails, or an operator has no kernel.
pub fn blocks(
    device: &Device,
    request: &BlockRequest,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let trace = &request.trace;
    let block = Block::with_attention(trace.clone(), "", None, Keep::All, Attention::Fused);
    let held = There::new(device, trace, request)?;
    let ids = tokens(request);
    let batch = Batch::new(device, micro_batch(request, &ids))?;
    let input = trace.tensors.iter().find(|t| t.role == TensorRole::Input);
    let input = input.map(|info| activation(device, info)).transpose()?;
    let gradient = trace.output_gradient.map(|id| trace.tensor(id));
    let gradient = gradient.map(|info| activation(device, info)).transpose()?;
    let timer = Timer::new(device, request)?;
    let mesh = request.position.mesh;
    let ranks: u64 = BLOCK_AXES.iter().map(|&axis| mesh.size(axis)).product();
    let comm = Loopback::new(0, ranks as usize);
    let mut host = alone(&comm, request.position, 1);
    host.watch = Some(&timer);
    let links = Rc::new(EchoLinks::new(device.clone()));
    let machine = Machine::linked(device.clone(), host, links.clone());
    let context = Context {
        machine: &machine,
        batch: &batch,
        parameters: &held,
    };
    let run = || -> Result<_, ProfilerError> {
        device.launcher.mark()?;
        let forward = cuda_device::forward(&block, &context, input.clone())?;
        let mut saved = forward.saved;
        let mut sink = Sink(&held);
        let dx = cuda_device::backward(
            &block,
            &context,
            &mut saved,
            gradient.clone(),
            Half::Both,
            &mut sink,
        )?;
        Ok((timer.finish()?, forward.output, dx))
    };
    let (_, output, dx) = device.memory.poisoned(run)?;
    check(&device.download(&output)?)?;
    if let Some(dx) = dx {
        check(&device.download(&dx)?)?;
    }
    drop(output);
    // Messages take no time here; but where a router chooses experts they must carry data, so that it does not read
    // unwritten numbers.
    let chooses = trace.forward_ops().any(|op| op.cost() == CostClass::TopK);
    links.carry(chooses);
    repeat(effort, || run().map(|(laps, ..)| laps))
}

/// A random activation, or its gradient.
fn activation(device: &Device, info: &TensorInfo) -> Result<Tensor, CudaError> {
    let shape = info.shape.iter().map(|&d| d as usize).collect();
    Ok(Tiled::new(device, shape, info.dtype, 0)?.tensor)
}

/// Records an event at the end of every operator.
struct Timer<'d> {
    device: &'d Device,
    mesh: BlockMesh,
    epilogues: Epilogues,
    kernels: RefCell<Vec<Kernel>>,
    /// Seconds between two events without work between them. Every measured lap contains them, so they are subtracted.
    empty: f64,
    /// The first error of recording an event.
    failed: RefCell<Option<CudaError>>,
}

impl Watch for Timer<'_> {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        if let Err(error) = self.device.launcher.mark() {
            *self.failed.borrow_mut() = Some(error);
        }
        let ranks = |axis| self.mesh.size(axis);
        let trace = &seen.block.trace;
        let kernel = trace.kernel_on_gpu(seen.op, &self.epilogues, ranks);
        self.kernels.borrow_mut().push(kernel);
        Ok(())
    }

    fn reads(&self) -> bool {
        false
    }
}

impl<'d> Timer<'d> {
    fn new(device: &'d Device, request: &BlockRequest) -> Result<Self, CudaError> {
        Ok(Self {
            device,
            mesh: request.position.mesh,
            epilogues: Epilogues::of(&request.trace),
            kernels: RefCell::default(),
            empty: empty_lap(device)?,
            failed: RefCell::default(),
        })
    }

    fn finish(&self) -> Result<Laps, CudaError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let kernels = std::mem::take(&mut *self.kernels.borrow_mut());
        let mut laps = Laps::new();
        for (kernel, lap) in kernels.into_iter().zip(self.device.launcher.laps()?) {
            let sum = laps.entry(kernel).or_default();
            // An operator fused with another may take no measurable time.
            sum.0 += (lap - self.empty).max(NOTHING);
            sum.1 += 1;
        }
        Ok(laps)
    }
}

/// The median time between two events that follow each other in the stream.
fn empty_lap(device: &Device) -> Result<f64, CudaError> {
    for _ in 0..=EMPTY_LAPS {
        device.launcher.mark()?;
    }
    let mut laps = device.launcher.laps()?;
    laps.sort_by(f64::total_cmp);
    Ok(laps.get(laps.len() / 2).copied().unwrap_or(0.0))
}

/// A block's parameters and gradients on the device.
struct There {
    parameters: BTreeMap<TensorId, Tensor>,
    gradients: BTreeMap<TensorId, Tensor>,
}

struct Sink<'t>(&'t There);

impl There {
    fn new(device: &Device, trace: &Trace, request: &BlockRequest) -> Result<Self, CudaError> {
        let mut there = Self {
            parameters: BTreeMap::new(),
            gradients: BTreeMap::new(),
        };
        for (seed, parameter) in (1u64..).zip(&trace.parameters) {
            let shape = local_shape(trace, parameter, &request.position);
            let zeros = device.zeros(shape.clone(), DType::F32)?;
            there.gradients.insert(parameter.tensor, zeros);
            let dtype = trace.tensor(parameter.tensor).dtype;
            let values = Tiled::new(device, shape, dtype, seed)?.tensor;
            there.parameters.insert(parameter.tensor, values);
        }
        Ok(there)
    }
}

impl Parameters<Tensor> for There {
    fn parameter(&self, id: TensorId) -> &Tensor {
        &self.parameters[&id]
    }
}

impl GradientSink for Sink<'_> {
    fn gradient(&mut self, id: TensorId) -> Tensor {
        self.0.gradients[&id].clone()
    }
}
