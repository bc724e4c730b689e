//! Measures a GPU: the operators of traced blocks as a rank runs them, one after the other in one stream,
//! the optimizer, copies, and what it costs to queue a kernel.
//!
//! Times lie between marks in the stream, so nothing waits while it is measured. Operators that run fused
//! with another count with the first of them; the others take no time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use dtensor::block::{Attention, Block, Half, Keep, Parameters, Seen, Watch, WatchError};
use dtensor::comm::loopback::Loopback;
use dtensor::cpu::{AdamWStep, MicroBatch};
use dtensor::cuda::{self, Batch, Context, CudaError, Device, Gpu, GradientSink, Machine, Tensor};
use dtensor::{TensorId, TensorRole, Trace};
use spec::DType;
use spec::profile::{self, Kernel, Measured};

use crate::ProfilerError;
use crate::blocks::{BlockRequest, Held, alone, random, tokens};
use crate::lanes::{Effort, Laps, summarised};

/// Kernels queued in a row to see what queueing one costs.
const QUEUED: u64 = 1000;
/// Seconds of an operator for which nothing ran.
const NOTHING: f64 = 1e-9;
/// Elements of a kernel that costs nothing but being started.
const TINY: usize = 32;

/// A GPU to measure, and what it says of itself.
pub struct Target {
    /// The device.
    pub device: Device,
    /// What a profile says of it.
    pub machine: profile::Machine,
}

impl Target {
    /// The GPU of that number.
    ///
    /// # Errors
    /// When there is none or a library is missing.
    pub fn new(ordinal: u32) -> Result<Self, ProfilerError> {
        let facts = cuda::ready()?;
        let facts = facts.get(ordinal as usize).ok_or(CudaError::NoDevice)?;
        Ok(Self {
            device: Device::new(Rc::new(Gpu::new(ordinal)?)),
            machine: profile::Machine {
                processor: facts.name.clone(),
                cores: 1,
                memory_bytes: facts.memory_bytes,
            },
        })
    }
}

/// Repeats work until enough was seen, after one run that warms up.
fn repeat(
    effort: Effort,
    mut work: impl FnMut() -> Result<Laps, ProfilerError>,
) -> Result<Vec<Measured>, ProfilerError> {
    work()?;
    let start = Instant::now();
    let mut seen = Vec::new();
    while seen.len() < effort.least || (start.elapsed() < effort.time && seen.len() < effort.most) {
        seen.push(work()?);
    }
    Ok(summarised(&seen, 1))
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
    let host = MicroBatch {
        ids: &ids,
        labels: &ids,
        first_sequence: 0,
        seq_len: request.seq_len,
        step: 0,
        loss_scale: 1.0 / ids.len() as f32,
    };
    let batch = Batch::new(device, host)?;
    let input = trace.tensors.iter().find(|t| t.role == TensorRole::Input);
    let input = input.map(|info| device.upload(&random(info))).transpose()?;
    let gradient = trace.output_gradient.map(|id| random(trace.tensor(id)));
    let gradient = gradient.map(|g| device.upload(&g)).transpose()?;
    let timer = Timer {
        device,
        kernels: RefCell::default(),
        failed: RefCell::default(),
    };
    let comm = Loopback::new(0, 1);
    let mut host = alone(&comm, request.position, 1);
    host.watch = Some(&timer);
    let machine = Machine::new(device.clone(), host);
    let context = Context {
        machine: &machine,
        batch: &batch,
        parameters: &held,
    };
    let mut checked = false;
    repeat(effort, || {
        device.launcher.mark()?;
        let forward = cuda::forward(&block, &context, input.clone())?;
        let mut saved = forward.saved;
        let mut sink = held.sink();
        let dx = cuda::backward(
            &block,
            &context,
            &mut saved,
            gradient.clone(),
            Half::Both,
            &mut sink,
        )?;
        let laps = timer.finish()?;
        if !std::mem::replace(&mut checked, true) {
            for x in [Some(&forward.output), dx.as_ref()].into_iter().flatten() {
                finite(device, x)?;
            }
        }
        Ok(laps)
    })
}

/// A kernel that skipped its work or read what nobody wrote shows here.
fn finite(device: &Device, x: &Tensor) -> Result<(), ProfilerError> {
    let host = device.download(x)?;
    match host.f32().iter().find(|v| !v.is_finite()) {
        Some(&value) => Err(ProfilerError::NotFinite {
            kernel: "a block".to_owned(),
            value,
        }),
        None => Ok(()),
    }
}

/// Measures the optimizer, the gradient norm and copies over that many elements.
///
/// # Errors
/// When memory or the device fails.
pub fn states(
    device: &Device,
    elements: u64,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let zeros = || device.zeros(vec![elements as usize], DType::F32);
    let [master, momentum, variance, gradient] = [zeros()?, zeros()?, zeros()?, zeros()?];
    let rounded = device.tensor(vec![elements as usize], DType::Bf16)?;
    repeat(effort, || {
        device.launcher.mark()?;
        device.squares(std::slice::from_ref(&gradient))?;
        device.launcher.mark()?;
        let states = [&master, &momentum, &variance, &gradient];
        device.adamw(states, Some(&rounded), &STEP)?;
        device.launcher.mark()?;
        device
            .launcher
            .copy(momentum.address(), gradient.address(), gradient.bytes())?;
        device.launcher.mark()?;
        let names = ["gradient norm", "adamw", "copy"];
        let laps = names.iter().zip(device.launcher.laps()?);
        let entry = |(name, lap): (&&str, f64)| (Kernel::new(*name, [elements]), (lap, 1));
        Ok(laps.map(entry).collect())
    })
}

const STEP: AdamWStep = AdamWStep {
    rate: 1e-4,
    betas: [0.9, 0.95],
    corrections: [0.1, 0.05],
    epsilon: 1e-8,
    keep: 0.9999,
    scale: 1.0,
};

/// Measures what it costs the host to queue a kernel, and the device to start one.
///
/// # Errors
/// When memory or the device fails.
pub fn launches(device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
    let x = device.zeros(vec![TINY], DType::F32)?;
    repeat(effort, || {
        device.launcher.mark()?;
        let start = Instant::now();
        for _ in 0..QUEUED {
            device.add(&x, &x)?;
        }
        let host = start.elapsed().as_secs_f64();
        device.launcher.mark()?;
        let there: f64 = device.launcher.laps()?.iter().sum();
        Ok(Laps::from([
            (Kernel::new("dispatch", [1]), (host, QUEUED)),
            (Kernel::new("launch", [1]), (there, QUEUED)),
        ]))
    })
}

/// Marks the end of every operator.
struct Timer<'d> {
    device: &'d Device,
    kernels: RefCell<Vec<Kernel>>,
    /// Why a mark could not be made.
    failed: RefCell<Option<CudaError>>,
}

impl Watch for Timer<'_> {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        if let Err(error) = self.device.launcher.mark() {
            *self.failed.borrow_mut() = Some(error);
        }
        self.kernels
            .borrow_mut()
            .push(seen.block.trace.kernel(seen.op, |_| 1));
        Ok(())
    }
}

impl Timer<'_> {
    fn finish(&self) -> Result<Laps, CudaError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let kernels = std::mem::take(&mut *self.kernels.borrow_mut());
        let mut laps = Laps::new();
        for (kernel, lap) in kernels.into_iter().zip(self.device.launcher.laps()?) {
            let sum = laps.entry(kernel).or_default();
            // Work that was fused with another's may take no time that a clock shows.
            sum.0 += lap.max(NOTHING);
            sum.1 += 1;
        }
        Ok(laps)
    }
}

/// A block's parameters and gradients on the device.
struct There {
    parameters: BTreeMap<TensorId, Tensor>,
    gradients: BTreeMap<TensorId, Tensor>,
}

struct Sink<'t>(&'t There);

impl There {
    fn new(device: &Device, trace: &Trace, request: &BlockRequest) -> Result<Self, CudaError> {
        let host = Held::new(trace, &request.position);
        let mut there = Self {
            parameters: BTreeMap::new(),
            gradients: BTreeMap::new(),
        };
        for (id, tensor) in host.parameters {
            let zeros = device.zeros(tensor.shape.clone(), DType::F32)?;
            there.gradients.insert(id, zeros);
            there.parameters.insert(id, device.upload(&tensor)?);
        }
        Ok(there)
    }

    fn sink(&self) -> Sink<'_> {
        Sink(self)
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use dtensor::BlockPosition;
    use dtensor::cuda::kernels;
    use dtensor::cuda::launcher::{Address, Arguments, Launch, Launcher, Product};
    use models::{BlockClass, BlockLayout};

    use super::*;

    /// A device that does nothing, and whose clock ticks a microsecond a mark.
    #[derive(Default)]
    struct Idle {
        next: Cell<Address>,
        marks: Cell<usize>,
    }

    impl Launcher for Idle {
        fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
            self.next.set(self.next.get() + bytes);
            Ok(self.next.get())
        }
        fn free(&self, _: Address) -> Result<(), CudaError> {
            Ok(())
        }
        fn write(&self, _: Address, _: &[u8]) -> Result<(), CudaError> {
            Ok(())
        }
        fn read(&self, _: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
            bytes.fill(0);
            Ok(())
        }
        fn copy(&self, _: Address, _: Address, _: u64) -> Result<(), CudaError> {
            Ok(())
        }
        fn fill(&self, _: Address, _: u8, _: u64) -> Result<(), CudaError> {
            Ok(())
        }
        fn launch(&self, _: kernels::Kernel, _: Launch, _: Arguments) -> Result<(), CudaError> {
            Ok(())
        }
        fn multiply(&self, _: &Product) -> Result<(), CudaError> {
            Ok(())
        }
        fn mark(&self) -> Result<(), CudaError> {
            self.marks.set(self.marks.get() + 1);
            Ok(())
        }
        fn laps(&self) -> Result<Vec<f64>, CudaError> {
            Ok(vec![1e-6; self.marks.replace(0) - 1])
        }
        fn synchronize(&self) -> Result<(), CudaError> {
            Ok(())
        }
        fn multiprocessors(&self) -> u32 {
            100
        }
    }

    const EFFORT: Effort = Effort {
        time: Duration::ZERO,
        least: 2,
        most: 2,
    };

    #[test]
    fn every_operator_of_a_block_has_a_time() {
        let json = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
            "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#;
        let model = spec::hf::decode(json, "test", "llama").expect("a model");
        let layout = BlockLayout::alone(1, 32, DType::Bf16);
        let device = Device::new(Rc::new(Idle::default()));
        for class in [
            BlockClass::Embedding,
            BlockClass::Layer(model.layer_class(0)),
            BlockClass::Head,
        ] {
            let request = BlockRequest {
                trace: models::trace_block(&model, class, &layout).expect("a block"),
                position: BlockPosition::SINGLE,
                micro_batch: 1,
                seq_len: 32,
                vocab: model.vocab,
                depth: 1,
            };
            let trace = &request.trace;
            let measured = blocks(&device, &request, EFFORT).expect("measures");
            let mut wanted: Vec<Kernel> = trace
                .forward
                .iter()
                .chain(&trace.backward)
                .map(|op| trace.kernel(op, |_| 1))
                .collect();
            wanted.sort();
            wanted.dedup();
            let got: Vec<Kernel> = measured
                .iter()
                .map(|m| Kernel::new(m.kernel.clone(), m.sizes.clone()))
                .collect();
            assert_eq!(got, wanted);
            assert!(measured.iter().all(|m| m.seconds > 0.0 && m.ranks == 1));
        }
        let names = |measured: Vec<Measured>| -> Vec<String> {
            measured.into_iter().map(|m| m.kernel).collect()
        };
        let states = states(&device, 100, EFFORT).expect("measures");
        assert_eq!(names(states), ["adamw", "copy", "gradient norm"]);
        let launches = launches(&device, EFFORT).expect("measures");
        assert_eq!(names(launches), ["dispatch", "launch"]);
        assert_eq!(device.memory.usage().live, 0);
    }
}
