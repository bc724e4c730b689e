//! The CUDA device: states and tensors are in GPU memory.

use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;
use std::slice::from_ref;
use std::time::Duration;

use catalog::{DType, Precision};
use comm::Group;
use cpu_device::Watch;
use cpu_device::{AdamWStep, ExactSum, MicroBatch, Numerics};
use cuda_device::launcher::{AttentionBy, Compute};
use cuda_device::{
    self, Batch, Collective, Context, CudaError, Gpu, GradientSink, Graph, Machine, NcclLinks,
    Saved, Tensor, Ticket,
};
use dtensor::TensorId;
use dtensor::block::{Attention, Block, Forward, Parameters};
use dtensor::train::{self, FlatStates, Gradients, Passing, Run};

use super::interface::{Device, Devices};
use crate::error::ExecutorError;
use crate::report::MemoryUse;
use crate::settings::AdamW;

/// The GPUs of this host.
#[derive(Clone, Copy, Debug)]
pub struct Gpus {
    /// This process's GPU; `None` if ranks are threads, each on the GPU with its own rank's number.
    pub ordinal: Option<u32>,
    /// How GPUs multiply fp32 matrices.
    pub compute: Compute,
    /// Which implementation runs core attention.
    pub attention: AttentionBy,
    /// What carries messages between GPUs.
    pub messages: Messages,
    /// How long a rank waits for another before it fails.
    pub timeout: Duration,
}

/// What carries messages between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// NCCL, directly between GPUs.
    Nccl,
    /// Staging through host memory: slow, but needs nothing installed.
    Host,
}

/// One rank on a GPU.
pub struct Cuda<'c>(Machine<'c>);

impl Devices for Gpus {
    type Device<'c> = Cuda<'c>;

    fn open<'c>(&self, host: cpu_device::Machine<'c>) -> Result<Cuda<'c>, ExecutorError> {
        let ordinal = self.ordinal.unwrap_or(host.comm.rank() as u32);
        let gpu = Rc::new(Gpu::new(ordinal)?);
        let device = cuda_device::Device::new(Rc::<Gpu>::clone(&gpu))
            .with_compute(self.compute)
            .with_attention(self.attention);
        let alone = host.comm.world() == 1;
        if alone || self.messages == Messages::Host {
            return on(device, host);
        }
        let links = NcclLinks::new(gpu, host.comm, self.timeout)?;
        check(&host)?;
        Ok(Cuda(Machine::linked(device, host, Rc::new(links))))
    }
}

/// A rank with a given device of its own that communicates through the host.
///
/// # Errors
/// When the device cannot run the plan.
pub fn on(
    device: cuda_device::Device,
    host: cpu_device::Machine<'_>,
) -> Result<Cuda<'_>, ExecutorError> {
    check(&host)?;
    Ok(Cuda(Machine::new(device, host)))
}

fn check(host: &cpu_device::Machine<'_>) -> Result<(), ExecutorError> {
    match host.numerics {
        Numerics::Fast => Ok(()),
        Numerics::Exact => Err(ExecutorError::Device {
            reason: "only the cpu device has exact numerics".to_owned(),
        }),
    }
}

/// A collective under way, and the tensor that receives its result.
type Moving = (Ticket, Tensor);

/// Copies fp32 numbers between tensors of the same size.
fn copy(machine: &Machine<'_>, to: &Tensor, from: &Tensor) -> Result<(), CudaError> {
    debug_assert_eq!(to.bytes(), from.bytes());
    let launcher = &machine.device.launcher;
    launcher.copy(to.address(), from.address(), from.bytes())
}

/// Part of a flat buffer.
fn part(flat: &Tensor, range: &Range<usize>) -> Tensor {
    flat.part(range.start, vec![range.len()])
}

impl train::Device for Cuda<'_> {
    type Tensor = Tensor;
    type Flat = Tensor;
    type Parcel = Tensor;
    type Sending = Ticket;
    type Moving = Moving;
    type Whole = Tensor;
    type Saved = Saved;
    type Batch<'b> = Batch<'b>;
    type Group = Group;
    type Trees = ();
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
        batch: &Batch<'_>,
        parameters: &dyn Parameters<Tensor>,
        input: Option<Tensor>,
    ) -> Result<Forward<Tensor, Saved>, ExecutorError> {
        let context = Context {
            machine: &self.0,
            batch,
            parameters,
        };
        Ok(cuda_device::forward(block, &context, input)?)
    }

    fn backward(
        &self,
        block: &Block,
        batch: &Batch<'_>,
        parameters: &dyn Parameters<Tensor>,
        passing: Passing<'_, Self>,
        gradients: &mut dyn Gradients<Self>,
    ) -> Result<Option<Tensor>, ExecutorError> {
        let context = Context {
            machine: &self.0,
            batch,
            parameters,
        };
        Ok(cuda_device::backward(
            block,
            &context,
            passing.saved,
            passing.gradient,
            passing.half,
            &mut Sink(gradients),
        )?)
    }

    fn saved_bytes(saved: &Saved) -> u64 {
        cuda_device::kept_bytes(saved)
    }

    fn elements(tensor: &Tensor) -> usize {
        tensor.len()
    }

    fn flat(&self, len: usize, draw: &dyn Fn() -> Vec<f32>) -> Result<Tensor, ExecutorError> {
        let values = draw();
        debug_assert_eq!(values.len(), len);
        let host = cpu_device::Tensor::new(vec![values.len()], values, DType::F32);
        Ok(self.0.device.upload(&host)?)
    }

    fn zeros(&self, len: usize) -> Result<Tensor, ExecutorError> {
        Ok(self.0.device.zeros(vec![len], DType::F32)?)
    }

    fn len(flat: &Tensor) -> usize {
        flat.len()
    }

    fn clear(&self, flat: &mut Tensor) -> Result<(), ExecutorError> {
        let launcher = &self.0.device.launcher;
        Ok(launcher.fill(flat.address(), 0, flat.bytes())?)
    }

    fn put(&self, flat: &mut Tensor, at: usize, from: &Tensor) -> Result<(), ExecutorError> {
        let to = part(flat, &(at..at + from.len()));
        Ok(copy(&self.0, &to, from)?)
    }

    fn add(
        &self,
        flat: &mut Tensor,
        at: usize,
        (terms, range): (&Tensor, Range<usize>),
    ) -> Result<(), ExecutorError> {
        let to = part(flat, &(at..at + range.len()));
        Ok(self.0.device.add_into(&to, &part(terms, &range))?)
    }

    fn rounded(
        &self,
        flat: &Tensor,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Tensor, ExecutorError> {
        let values = flat.part(range.start, shape);
        debug_assert_eq!(values.len(), range.len());
        Ok(self.0.device.cast(&values, dtype)?)
    }

    fn put_tensor(
        &self,
        flat: &mut Tensor,
        at: usize,
        tensor: &Tensor,
    ) -> Result<(), ExecutorError> {
        debug_assert_eq!(tensor.dtype, DType::F32);
        self.put(flat, at, tensor)
    }

    fn adamw(
        &self,
        states: FlatStates<'_, Self>,
        runs: &[Run],
        values: &mut [Option<Tensor>],
    ) -> Result<(), ExecutorError> {
        let weights = runs.iter().map(|run| {
            let from = run.gradient_at;
            let value = run.value.and_then(|at| values[at].clone());
            let shard = states.shard.as_deref();
            cuda_device::Weights {
                states: [
                    part(states.master, &run.range),
                    part(states.momentum, &run.range),
                    part(states.variance, &run.range),
                    part(states.gradient, &(from..from + run.range.len())),
                ],
                rounded: value.or_else(|| shard.map(|shard| part(shard, &run.range))),
                decays: run.decays,
            }
        });
        let weights: Vec<_> = weights.collect();
        Ok(self.0.optimizer()?.step(&weights)?)
    }

    fn parcel(&self, tensor: &Tensor) -> Result<Tensor, ExecutorError> {
        Ok(tensor.clone())
    }

    fn parcel_of(&self, flat: &Tensor, range: Range<usize>) -> Result<Tensor, ExecutorError> {
        Ok(part(flat, &range))
    }

    fn send(
        &self,
        to: usize,
        channel: u64,
        what: &str,
        parcel: &Tensor,
    ) -> Result<Ticket, ExecutorError> {
        Ok(self.0.links.send(to, channel, what, parcel)?)
    }

    fn sent(&self, sending: Ticket) -> Result<(), ExecutorError> {
        Ok(self.0.links.wait(sending)?)
    }

    fn receive(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        (shape, dtype): (Vec<usize>, DType),
    ) -> Result<Tensor, ExecutorError> {
        let x = self.0.device.tensor(shape, dtype)?;
        self.0.links.receive(from, channel, what, &x)?;
        Ok(x)
    }

    fn all_gather(
        &self,
        group: &Group,
        what: &str,
        own: Tensor,
        lengths: &[usize],
    ) -> Result<Moving, ExecutorError> {
        let whole = self
            .0
            .device
            .tensor(vec![lengths.iter().sum()], own.dtype)?;
        let mut at = 0;
        let mut parts = Vec::with_capacity(lengths.len());
        for &len in lengths {
            parts.push(whole.part(at, vec![len]));
            at += len;
        }
        let links = &self.0.links;
        let ticket = links.collective(Collective::AllGather, group, what, &[own], &parts)?;
        Ok((ticket, whole))
    }

    fn gathered(&self, (ticket, whole): Moving) -> Result<Tensor, ExecutorError> {
        self.0.links.wait(ticket)?;
        Ok(whole)
    }

    fn taken(
        &self,
        whole: &Tensor,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Tensor, ExecutorError> {
        // A copy of its own is aligned to 16 bytes, which kernels read faster.
        self.rounded(whole, range, shape, dtype)
    }

    fn put_whole(&self, flat: &mut Tensor, at: usize, whole: &Tensor) -> Result<(), ExecutorError> {
        self.put(flat, at, whole)
    }

    fn reduce_scatter(
        &self,
        group: &Group,
        what: &str,
        parts: Vec<Tensor>,
    ) -> Result<Moving, ExecutorError> {
        let own = vec![parts[group.index].len()];
        let own = self.0.device.tensor(own, DType::F32)?;
        let (kind, to) = (Collective::ReduceScatter, from_ref(&own));
        let ticket = self.0.links.collective(kind, group, what, &parts, to)?;
        Ok((ticket, own))
    }

    fn reduced(&self, _: &Group, _: &str, moving: Moving) -> Result<Tensor, ExecutorError> {
        self.gathered(moving)
    }

    fn all_reduce(
        &self,
        group: &Group,
        what: &str,
        flat: &mut Tensor,
        runs: &[Range<usize>],
    ) -> Result<(), ExecutorError> {
        if group.size() == 1 {
            return Ok(());
        }
        let parts: Vec<Tensor> = runs.iter().map(|run| part(flat, run)).collect();
        let all_reduce = |of: &[Tensor]| {
            let kind = Collective::AllReduce;
            self.0.links.exchange(kind, group, what, of, of)
        };
        if parts.len() == 1 {
            return Ok(all_reduce(&parts)?);
        }
        let together = self
            .0
            .device
            .tensor(vec![parts.iter().map(Tensor::len).sum()], DType::F32)?;
        let mut at = 0;
        let places: Vec<Range<usize>> = parts
            .iter()
            .map(|part| {
                at += part.len();
                at - part.len()..at
            })
            .collect();
        for (place, from) in places.iter().zip(&parts) {
            copy(&self.0, &part(&together, place), from)?;
        }
        all_reduce(from_ref(&together))?;
        for (place, to) in places.iter().zip(&parts) {
            copy(&self.0, to, &part(&together, place))?;
        }
        Ok(())
    }
}

impl Device for Cuda<'_> {
    type Captured = Graph;
    const NAME: &'static str = "cuda";
    const PRECISIONS: &'static [Precision] = &[Precision::Fp32, Precision::Bf16, Precision::Fp8];
    const ATTENTION: Attention = Attention::Fused;

    fn set_watch(&mut self, watch: &'static dyn Watch) {
        self.0.host.watch = Some(watch);
    }

    fn batch<'b>(
        &self,
        micro_batch: u32,
        batch: MicroBatch<'b>,
    ) -> Result<Batch<'b>, ExecutorError> {
        Ok(self.0.batch(micro_batch, batch)?)
    }

    fn read<'f>(
        &self,
        flat: &'f Tensor,
        range: Range<usize>,
    ) -> Result<Cow<'f, [f32]>, ExecutorError> {
        let host = self.0.device.download(&part(flat, &range))?;
        Ok(Cow::Owned(host.into_f32()))
    }

    fn write(&self, flat: &mut Tensor, at: usize, values: &[f32]) -> Result<(), ExecutorError> {
        let to = part(flat, &(at..at + values.len()));
        Ok(self.0.device.write(&to, values)?)
    }

    fn set_numbers(&self, step: &AdamWStep) -> Result<(), ExecutorError> {
        Ok(self.0.optimizer()?.set_numbers(step)?)
    }

    fn measure_and_clip(
        &self,
        gradients: &[(&Tensor, Range<usize>)],
        losses: Option<&Tensor>,
        optimizer: &AdamW,
    ) -> Result<(), ExecutorError> {
        let gradients = gradients.iter();
        let parts: Vec<Tensor> = gradients.map(|(flat, range)| part(flat, range)).collect();
        let losses: Vec<Tensor> = losses.into_iter().cloned().collect();
        let limit = optimizer.clip_norm;
        Ok(self
            .0
            .optimizer()?
            .measure_and_clip(&parts, &losses, limit)?)
    }

    fn squares(&self) -> Result<ExactSum, ExecutorError> {
        let mut sum = ExactSum::default();
        sum.add(self.0.optimizer()?.squares()?);
        Ok(sum)
    }

    fn set_scale(&self, scale: f32) -> Result<(), ExecutorError> {
        Ok(self.0.optimizer()?.set_scale(scale)?)
    }

    fn captures(&self) -> Result<(), &'static str> {
        self.0.links.captures()
    }

    fn begin_capture(&self) -> Result<(), ExecutorError> {
        Ok(self.0.device.begin_capture()?)
    }

    fn end_capture(&self) -> Result<Graph, ExecutorError> {
        Ok(self.0.device.end_capture()?)
    }

    fn replay(&self, captured: &Graph) -> Result<(), ExecutorError> {
        Ok(captured.replay()?)
    }

    fn take_peak(&self) -> Option<MemoryUse> {
        let memory = &self.0.device.memory;
        let usage = memory.usage();
        memory.reset_peak();
        Some(MemoryUse {
            peak: usage.peak,
            reserved: usage.reserved,
        })
    }

    fn attention_library(&self) -> Option<Result<String, String>> {
        self.0.device.launcher.attention_library()
    }

    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), ExecutorError> {
        Ok(self.0.links.meet(peers)?)
    }

    fn receive_flat(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        len: usize,
    ) -> Result<Tensor, ExecutorError> {
        train::Device::receive(self, from, channel, what, (vec![len], DType::F32))
    }

    fn settle(&self, what: &str) -> Result<(), ExecutorError> {
        Ok(self.0.links.settle(what)?)
    }

    fn mark(&self) -> Result<(), ExecutorError> {
        Ok(self.0.device.launcher.mark()?)
    }

    fn laps(&self) -> Result<Vec<f64>, ExecutorError> {
        Ok(self.0.device.launcher.laps()?)
    }
}

/// The gradients' destination in the form that the CUDA kernels expect.
struct Sink<'g, 'c>(&'g mut dyn Gradients<Cuda<'c>>);

impl GradientSink for Sink<'_, '_> {
    fn gradient(&mut self, id: TensorId) -> Tensor {
        let (flat, slot) = self.0.sum(id);
        flat.part(slot.offset, slot.shape())
    }
}
