//! GPUs: states and tensors lie in a device's memory, messages pass through the host.

use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;

use dtensor::TensorId;
use dtensor::block::{Attention, Block, Forward, Parameters, Watch};
use dtensor::comm::Message;
use dtensor::cpu::{self, AdamWStep, ExactSum, MicroBatch, Numerics};
use dtensor::cuda::{self, Batch, Context, Gpu, GradientSink, Machine, Saved, Tensor};
use spec::DType;

use super::{Device, Devices, Passing, Weights};
use crate::error::ExecutorError;
use crate::states::BlockGradients;

/// The GPUs of this host.
#[derive(Clone, Copy, Debug)]
pub struct Gpus {
    /// This process's GPU; without one, ranks are threads and each has the GPU of its number.
    pub ordinal: Option<u32>,
}

impl Devices for Gpus {
    type Device<'c> = Machine<'c>;

    fn open<'c>(&self, host: cpu::Machine<'c>) -> Result<Machine<'c>, ExecutorError> {
        let ordinal = self.ordinal.unwrap_or(host.comm.rank() as u32);
        let gpu = Gpu::new(ordinal)?;
        on(cuda::Device::new(Rc::new(gpu)), host)
    }
}

/// A rank on a device of its own.
///
/// # Errors
/// When the device cannot run the plan.
pub fn on(device: cuda::Device, host: cpu::Machine<'_>) -> Result<Machine<'_>, ExecutorError> {
    let wrong = |reason: &str| {
        Err(ExecutorError::Device {
            reason: reason.to_owned(),
        })
    };
    if host.numerics == Numerics::Exact {
        return wrong("exact numerics are the cpu device's");
    }
    let mesh = host.position.mesh;
    if mesh.ep * mesh.etp > 1 {
        return wrong("a layer's experts lie on one GPU: expected ep=1 and etp=1");
    }
    Ok(Machine::new(device, host))
}

/// Part of a flat run.
fn part(flat: &Tensor, range: &Range<usize>) -> Tensor {
    flat.part(range.start, vec![range.len()])
}

impl Device for Machine<'_> {
    type Tensor = Tensor;
    type Flat = Tensor;
    type Saved = Saved;
    type Batch<'b> = Batch<'b>;
    const ATTENTION: Attention = Attention::Fused;

    fn set_watch(&mut self, watch: &'static dyn Watch) {
        self.host.watch = Some(watch);
    }

    fn batch<'b>(&self, batch: MicroBatch<'b>) -> Result<Batch<'b>, ExecutorError> {
        Ok(Batch::new(&self.device, batch)?)
    }

    fn forward(
        &self,
        block: &Block,
        batch: &Batch<'_>,
        parameters: &dyn Parameters<Tensor>,
        input: Option<Tensor>,
    ) -> Result<Forward<Tensor, Saved>, ExecutorError> {
        let context = Context {
            machine: self,
            batch,
            parameters,
        };
        Ok(cuda::forward(block, &context, input)?)
    }

    fn backward(
        &self,
        block: &Block,
        batch: &Batch<'_>,
        parameters: &dyn Parameters<Tensor>,
        passing: Passing<'_, Self>,
        gradients: &mut BlockGradients<'_, Self>,
    ) -> Result<Option<Tensor>, ExecutorError> {
        let context = Context {
            machine: self,
            batch,
            parameters,
        };
        let Passing {
            saved,
            gradient,
            half,
        } = passing;
        Ok(cuda::backward(
            block, &context, saved, gradient, half, gradients,
        )?)
    }

    fn saved_bytes(saved: &Saved) -> u64 {
        saved.bytes()
    }

    fn shape(tensor: &Tensor) -> &[usize] {
        &tensor.shape
    }

    fn pack(&self, tensor: &Tensor) -> Result<Message, ExecutorError> {
        Ok(self.device.download(tensor)?.pack())
    }

    fn unpack<'b>(
        &self,
        shape: Vec<usize>,
        pieces: impl IntoIterator<Item = &'b [u8]>,
        dtype: DType,
    ) -> Result<Tensor, ExecutorError> {
        let host = cpu::Tensor::from_pieces(shape, pieces, dtype);
        Ok(self.device.upload(&host)?)
    }

    fn numbers<'t>(&self, tensor: &'t Tensor) -> Result<Cow<'t, [f32]>, ExecutorError> {
        Ok(Cow::Owned(self.device.download(tensor)?.into_f32()))
    }

    fn flat(&self, values: Vec<f32>) -> Result<Tensor, ExecutorError> {
        let host = cpu::Tensor::new(vec![values.len()], values, DType::F32);
        Ok(self.device.upload(&host)?)
    }

    fn zeros(&self, len: usize) -> Result<Tensor, ExecutorError> {
        Ok(self.device.zeros(vec![len], DType::F32)?)
    }

    fn len(flat: &Tensor) -> usize {
        flat.len()
    }

    fn clear(&self, flat: &mut Tensor) -> Result<(), ExecutorError> {
        let launcher = &self.device.launcher;
        Ok(launcher.fill(flat.address(), 0, flat.bytes())?)
    }

    fn read<'f>(
        &self,
        flat: &'f Tensor,
        range: Range<usize>,
    ) -> Result<Cow<'f, [f32]>, ExecutorError> {
        let host = self.device.download(&part(flat, &range))?;
        Ok(Cow::Owned(host.into_f32()))
    }

    fn write(&self, flat: &mut Tensor, at: usize, values: &[f32]) -> Result<(), ExecutorError> {
        let to = part(flat, &(at..at + values.len()));
        Ok(self.device.write(&to, values)?)
    }

    fn add(&self, flat: &mut Tensor, at: usize, values: &[f32]) -> Result<(), ExecutorError> {
        let terms = self.flat(values.to_vec())?;
        let to = part(flat, &(at..at + values.len()));
        let sum = self.device.add(&to, &terms)?;
        let launcher = &self.device.launcher;
        Ok(launcher.copy(to.address(), sum.address(), sum.bytes())?)
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
        Ok(self.device.cast(&values, dtype)?)
    }

    fn squares(
        &self,
        parts: &[(&Tensor, Range<usize>)],
        sum: &mut ExactSum,
    ) -> Result<(), ExecutorError> {
        let parts: Vec<Tensor> = parts
            .iter()
            .map(|(flat, range)| part(flat, range))
            .collect();
        sum.add(self.device.squares(&parts)?);
        Ok(())
    }

    fn adamw(
        &self,
        weights: Weights<'_, Self>,
        step: &AdamWStep,
        value: Option<&mut Tensor>,
    ) -> Result<(), ExecutorError> {
        let range = weights.range;
        let from = weights.gradient_at;
        let master = part(weights.master, &range);
        let states = [
            &master,
            &part(weights.momentum, &range),
            &part(weights.variance, &range),
            &part(weights.gradient, &(from..from + range.len())),
        ];
        let rounded = value.as_deref().filter(|value| value.is_bf16());
        self.device.adamw(states, rounded, step)?;
        if let Some(value) = value.filter(|value| !value.is_bf16()) {
            let launcher = &self.device.launcher;
            launcher.copy(value.address(), master.address(), master.bytes())?;
        }
        Ok(())
    }

    fn mark(&self) -> Result<(), ExecutorError> {
        Ok(self.device.launcher.mark()?)
    }

    fn laps(&self) -> Result<Vec<f64>, ExecutorError> {
        Ok(self.device.launcher.laps()?)
    }
}

impl GradientSink for BlockGradients<'_, Machine<'_>> {
    fn gradient(&mut self, id: TensorId) -> Tensor {
        let (flat, slot) = self.sum(id);
        flat.part(slot.offset, slot.shape())
    }
}
