//! What it costs the host to queue an operator of the cuda device: `cargo bench -p vescale-cuda-device`.
//!
//! `layer` is the forward and backward of one Llama 3 8B layer on a device that does nothing. An item is one kernel,
//! GEMM, copy or fill, so the time per item is the dispatch overhead without the driver's.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use catalog::DType;
use comm::{Group, local};
use cpu_device::{MicroBatch, Numerics};
use cuda_device::kernels::Kernel;
use cuda_device::launcher::{
    Address, Arguments, AttentionOperands, GraphId, Launch, Launcher, Product,
};
use cuda_device::{Batch, Context, CudaError, Device, GradientSink, Machine, Tensor};
use divan::Bencher;
use divan::counter::ItemsCount;
use dtensor::block::{Attention, Block, Half, Keep, Parameters};
use dtensor::{BlockPosition, CausalAttention, TensorId, TensorRole};
use models::{BlockClass, BlockLayout};

fn main() {
    divan::main();
}

/// A device that only counts the work it is asked to run.
#[derive(Default)]
struct Idle {
    next: Cell<u64>,
    queued: Cell<usize>,
}

impl Idle {
    fn count(&self) -> Result<(), CudaError> {
        self.queued.set(self.queued.get() + 1);
        Ok(())
    }
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
        self.count()
    }
    fn fill(&self, _: Address, _: u8, _: u64) -> Result<(), CudaError> {
        self.count()
    }
    fn launch(&self, _: Kernel, _: Launch, mut arguments: Arguments) -> Result<(), CudaError> {
        divan::black_box(arguments.pointers());
        self.count()
    }
    fn takes(&self, _: &Product) -> Result<bool, CudaError> {
        Ok(true)
    }
    fn multiply(&self, product: &Product) -> Result<(), CudaError> {
        divan::black_box(product);
        self.count()
    }
    fn attention_workspaces(&self, _: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError> {
        Ok(None)
    }
    fn attend(&self, _: &CausalAttention, _: &AttentionOperands) -> Result<(), CudaError> {
        self.count()
    }
    fn attention_library(&self) -> Option<Result<String, String>> {
        None
    }
    fn mark(&self) -> Result<(), CudaError> {
        Ok(())
    }
    fn laps(&self) -> Result<Vec<f64>, CudaError> {
        Ok(Vec::new())
    }
    fn synchronize(&self) -> Result<(), CudaError> {
        Ok(())
    }
    fn begin_capture(&self) -> Result<(), CudaError> {
        Ok(())
    }
    fn end_capture(&self) -> Result<GraphId, CudaError> {
        Ok(GraphId(0))
    }
    fn replay(&self, _: GraphId) -> Result<(), CudaError> {
        Ok(())
    }
    fn forget(&self, _: GraphId) {}
    fn multiprocessors(&self) -> u32 {
        132
    }
    fn fuses_gelu(&self) -> bool {
        true
    }
}

/// Parameters and their gradients, for which only addresses exist.
struct Held {
    parameters: BTreeMap<TensorId, Tensor>,
    gradients: BTreeMap<TensorId, Tensor>,
}

impl Parameters<Tensor> for Held {
    fn parameter(&self, id: TensorId) -> &Tensor {
        &self.parameters[&id]
    }
}

impl GradientSink for &Held {
    fn gradient(&mut self, id: TensorId) -> Tensor {
        self.gradients[&id].clone()
    }
}

#[divan::bench]
fn layer(bencher: Bencher<'_, '_>) {
    let model = catalog::load::model("llama3-8b").expect("a preset");
    let class = BlockClass::Layer(model.layer_class(0));
    let layout = BlockLayout::alone(1, 4096, DType::Bf16);
    let trace = models::trace_block(&model, class, &layout).expect("traced");
    let block = Block::with_attention(trace, "", None, Keep::All, Attention::Fused);
    let idle = Rc::new(Idle::default());
    let device = Device::new(Rc::<Idle>::clone(&idle));
    let of = |id: TensorId, dtype: DType| {
        let shape = block.trace.tensor(id).shape.iter();
        let tensor = device.tensor(shape.map(|&d| d as usize).collect(), dtype);
        tensor.expect("memory")
    };
    let all = |role: TensorRole, dtype: DType| -> BTreeMap<TensorId, Tensor> {
        let ids = (0..block.trace.tensors.len() as u32).map(TensorId);
        let ids = ids.filter(|&id| block.trace.tensor(id).role == role);
        ids.map(|id| (id, of(id, dtype))).collect()
    };
    let held = Held {
        parameters: all(TensorRole::Parameter, DType::Bf16),
        gradients: all(TensorRole::Parameter, DType::F32),
    };
    let input = all(TensorRole::Input, DType::Bf16).into_values().next();
    let gradient = block.trace.output_gradient.map(|id| of(id, DType::Bf16));
    let world = local::world(1, Duration::from_secs(1));
    let machine = Machine::new(
        device.clone(),
        cpu_device::Machine {
            comm: &world[0],
            groups: [(); 4].map(|()| Group::single(0)),
            position: BlockPosition::SINGLE,
            numerics: Numerics::Fast,
            threads: 1,
            seed: 1,
            watch: None,
        },
    );
    let ids = vec![0; 4096];
    let host = MicroBatch {
        ids: &ids,
        labels: &ids,
        first_sequence: 0,
        seq_len: 4096,
        step: 0,
        loss_scale: 1.0,
    };
    let batch = Batch::new(&device, host).expect("memory");
    let context = Context {
        machine: &machine,
        batch: &batch,
        parameters: &held,
    };
    let pass = || {
        let forward = cuda_device::forward(&block, &context, input.clone()).expect("queued");
        let mut saved = forward.saved;
        let (both, mut sink) = (Half::Both, &held);
        let gradient = gradient.clone();
        cuda_device::backward(&block, &context, &mut saved, gradient, both, &mut sink)
            .expect("queued")
    };
    // The first pass makes the lists and allocates the memory that all later ones reuse.
    pass();
    idle.queued.set(0);
    pass();
    let items = ItemsCount::new(idle.queued.get());
    bencher.counter(items).bench_local(pass);
}
