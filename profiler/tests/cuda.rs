//! The profiler for GPUs, tested without one: it measures the emulator of the cuda device, and must refuse kernels that
//! do not do their work.

#[path = "../../devices/cuda/tests/cuda/emulator.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod emulator;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use catalog::profile::Kernel;
use catalog::{CpKind, DType, Model};
use cuda_device::launcher::{
    Address, Arguments, AttentionOperands, GraphId, Launch, Launcher, Product,
};
use cuda_device::{CudaError, Device, kernels};
use dtensor::CausalAttention;
use dtensor::{BlockMesh, BlockPosition, CostClass, Epilogues};
use models::{BlockClass, BlockLayout};
use profiler::cuda::{
    Asked, Causal, ELEMENTS, Linear, OPERATORS, Operator, OperatorKind, Request, Way,
};
use profiler::{BlockRequest, Effort, ProfilerError};

const EFFORT: Effort = Effort {
    time: Duration::ZERO,
    least: 2,
    most: 2,
};

/// Small sizes that no tile divides, because the emulator is slow.
fn grid() -> Vec<Request> {
    let mut requests = vec![
        Request::Copies(1000),
        Request::States(66_003),
        Request::Launches,
        Request::Attention(Causal {
            batch: 2,
            length: 66,
            heads: 1,
            groups: 1,
            dim: 64,
        }),
        Request::Attention(Causal {
            batch: 1,
            length: 70,
            heads: 2,
            groups: 1,
            dim: 128,
        }),
    ];
    for element in ELEMENTS {
        let [rows, inputs, outputs] = match element.way {
            Way::Whole | Way::Tf32 => [33, 40, 17],
            Way::EightBits => [48, 80, 32],
        };
        requests.push(Request::Product(Linear {
            rows,
            inputs,
            outputs,
            element,
        }));
    }
    for &kind in OPERATORS {
        for dtype in [DType::Bf16, DType::F32] {
            // Logits are never widened, so the loss has one name in 32 bits and bf16.
            if kind != OperatorKind::CrossEntropy || dtype == DType::Bf16 {
                requests.push(Request::Operator(Operator {
                    kind,
                    rows: 21,
                    columns: 136,
                    dtype,
                }));
            }
        }
    }
    requests
}

fn measured(request: &Request, device: &Device) -> Result<Vec<Kernel>, ProfilerError> {
    let measured = request.measure(device, EFFORT)?;
    assert!(measured.iter().all(|m| m.seconds > 0.0 && m.ranks == 1));
    let mut kernels: Vec<Kernel> = measured
        .into_iter()
        .map(|m| Kernel::new(m.kernel, m.sizes))
        .collect();
    kernels.sort();
    Ok(kernels)
}

fn wanted(request: &Request) -> Vec<Kernel> {
    let mut kernels = request.kernels();
    kernels.sort();
    kernels
}

#[test]
fn grids_are_right_and_measured() {
    let Some(device) = emulator::device() else {
        return;
    };
    for request in grid() {
        let kernels = measured(&request, &device);
        assert_eq!(kernels, Ok(wanted(&request)), "{request:?}");
    }
    assert_eq!(device.memory.usage().live, 0);
}

/// The work that a lazy device skips.
#[derive(Clone, Copy, Debug)]
enum Undone {
    Kernels,
    Products,
    Reads,
}

/// A device that skips some of its work.
struct Lazy {
    works: Rc<dyn Launcher>,
    undone: Undone,
    marks: Cell<usize>,
}

impl Launcher for Lazy {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        self.works.allocate(bytes)
    }
    fn free(&self, address: Address) -> Result<(), CudaError> {
        self.works.free(address)
    }
    fn write(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        self.works.write(to, bytes)
    }
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        match self.undone {
            Undone::Reads => Ok(()),
            Undone::Kernels | Undone::Products => self.works.read(from, bytes),
        }
    }
    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        self.works.copy(to, from, bytes)
    }
    fn fill(&self, to: Address, value: u8, bytes: u64) -> Result<(), CudaError> {
        self.works.fill(to, value, bytes)
    }
    fn launch(
        &self,
        kernel: kernels::Kernel,
        launch: Launch,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        match self.undone {
            Undone::Kernels => Ok(()),
            Undone::Products | Undone::Reads => self.works.launch(kernel, launch, arguments),
        }
    }
    fn takes(&self, product: &Product) -> Result<bool, CudaError> {
        self.works.takes(product)
    }
    fn multiply(&self, product: &Product) -> Result<(), CudaError> {
        match self.undone {
            Undone::Products => Ok(()),
            Undone::Kernels | Undone::Reads => self.works.multiply(product),
        }
    }
    fn attention_workspaces(&self, of: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError> {
        self.works.attention_workspaces(of)
    }
    fn attend(&self, of: &CausalAttention, operands: &AttentionOperands) -> Result<(), CudaError> {
        match self.undone {
            Undone::Kernels => Ok(()),
            Undone::Products | Undone::Reads => self.works.attend(of, operands),
        }
    }
    fn attention_library(&self) -> Option<Result<String, String>> {
        self.works.attention_library()
    }
    fn begin_capture(&self) -> Result<(), CudaError> {
        self.works.begin_capture()
    }
    fn end_capture(&self) -> Result<GraphId, CudaError> {
        self.works.end_capture()
    }
    fn replay(&self, graph: GraphId) -> Result<(), CudaError> {
        self.works.replay(graph)
    }
    fn forget(&self, graph: GraphId) {
        self.works.forget(graph);
    }
    fn mark(&self) -> Result<(), CudaError> {
        self.marks.set(self.marks.get() + 1);
        Ok(())
    }
    fn laps(&self) -> Result<Vec<f64>, CudaError> {
        Ok(vec![1e-6; self.marks.replace(0) - 1])
    }
    fn synchronize(&self) -> Result<(), CudaError> {
        self.works.synchronize()
    }
    fn multiprocessors(&self) -> u32 {
        self.works.multiprocessors()
    }
    fn fuses_gelu(&self) -> bool {
        self.works.fuses_gelu()
    }
}

#[test]
fn work_left_undone_is_refused() {
    let Some(works) = emulator::device() else {
        return;
    };
    for request in grid() {
        let undone = match request {
            Request::Product(_) => Undone::Products,
            Request::Copies(_) => Undone::Reads,
            _ => Undone::Kernels,
        };
        let device = Device::new(Rc::new(Lazy {
            works: Rc::clone(&works.launcher),
            undone,
            marks: Cell::new(0),
        }));
        let result = request.measure(&device, EFFORT);
        match request {
            // An empty kernel's result is not checked.
            Request::Launches => assert!(result.is_ok()),
            _ => assert!(
                matches!(result, Err(ProfilerError::Wrong { .. })),
                "{request:?}: {result:?}"
            ),
        }
    }
}

fn model(json: &str) -> Model {
    catalog::hf::decode(json, "test", "model").expect("a model")
}

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#;
const MIXTRAL: &str = r#"{"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_local_experts": 4,
    "num_experts_per_tok": 2}"#;
const GPT: &str = r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2,
    "n_positions": 64, "vocab_size": 128, "activation_function": "gelu_new"}"#;

fn classes(model: &Model) -> [BlockClass; 3] {
    let layer = BlockClass::Layer(model.layer_class(0));
    [BlockClass::Embedding, layer, BlockClass::Head]
}

/// A block is measured alone, and as one of two ranks at local shapes, where exchanges are only
/// packed.
#[test]
fn every_operator_of_a_block_has_a_time() {
    let Some(device) = emulator::device() else {
        return;
    };
    let (llama, mixtral) = (model(LLAMA), model(MIXTRAL));
    let alone = BlockLayout::alone(1, 32, DType::Bf16);
    let layouts = [
        alone,
        BlockLayout { tp: 2, ..alone },
        BlockLayout {
            tp: 2,
            sequence_parallel: true,
            ..alone
        },
        BlockLayout {
            cp: 2,
            cp_kind: CpKind::Ring,
            ..alone
        },
        BlockLayout {
            cp: 2,
            cp_kind: CpKind::AllGather,
            ..alone
        },
        BlockLayout {
            cp: 2,
            cp_kind: CpKind::AllToAll,
            ..alone
        },
    ];
    let experts = BlockLayout {
        tp: 2,
        ep: 2,
        ..alone
    };
    let cases = layouts.map(|layout| (&llama, layout));
    for (model, layout) in cases
        .into_iter()
        .chain([(&mixtral, alone), (&mixtral, experts)])
    {
        for class in classes(model) {
            let request = Request::Block(Box::new(BlockRequest {
                trace: models::trace_block(model, class, &layout).expect("a block"),
                position: BlockPosition {
                    mesh: BlockMesh {
                        tp: layout.tp,
                        cp: layout.cp,
                        ep: layout.ep,
                        etp: 1,
                    },
                    at: [0; 4],
                },
                micro_batch: 1,
                seq_len: 32,
                vocab: model.vocab,
                depth: 1,
            }));
            let kernels = measured(&request, &device);
            assert_eq!(kernels, Ok(wanted(&request)), "{class:?} {layout:?}");
            assert!(!wanted(&request).is_empty());
        }
    }
}

/// Grids name kernels as traces do, so that their measurements price the kernels of blocks.
#[test]
fn grids_have_the_names_of_traces() {
    let wide = BlockLayout::alone(1, 32, DType::Bf16);
    let narrow = BlockLayout {
        eight_bits: true,
        ..wide
    };
    let mut names: Vec<String> = Vec::new();
    for (model, layout) in [
        (model(LLAMA), wide),
        (model(GPT), wide),
        (model(LLAMA), narrow),
        (model(GPT), narrow),
    ] {
        for class in classes(&model) {
            let trace = models::trace_block(&model, class, &layout).expect("a block");
            let epilogues = Epilogues::of(&trace);
            names.extend(
                trace
                    .ops()
                    .map(|op| trace.kernel_on_gpu(op, &epilogues, |_| 1).name),
            );
        }
    }
    let beside = ["copy to device", "copy to host", "dispatch", "launch"];
    let states = ["adamw", "copy", "gradient norm"];
    for request in grid() {
        for kernel in request.kernels() {
            // A plan does not choose TF32; `run --tf32` does.
            let name = kernel.name.replace(" tf32", " bf16");
            let name = name.replace(" f32", " bf16");
            let name = name.replace("cross-entropy forward bf16", "cross-entropy forward f32");
            let name = name.replace("cross-entropy backward bf16", "cross-entropy backward f32");
            let known = names.contains(&name)
                || beside.contains(&name.as_str())
                || states.contains(&name.as_str());
            assert!(known, "{name}");
        }
    }
}

/// Attentions that do different work have different names.
#[test]
fn attention_is_named_by_what_it_does() {
    let layout = BlockLayout::alone(1, 8192, DType::Bf16);
    for (name, layer, wanted) in [
        ("llama3-8b", 0, "attention scores forward bf16"),
        ("gpt2", 0, "attention scores dropout forward bf16"),
        ("bloom-7b1", 0, "attention scores alibi forward bf16"),
        (
            "gemma2-9b",
            0,
            "attention scores bounded window 4096 forward bf16",
        ),
        ("gemma2-9b", 1, "attention scores bounded forward bf16"),
        (
            "gpt-oss-20b",
            0,
            "attention scores sinks window 128 forward bf16",
        ),
    ] {
        let model = catalog::load::model(name).expect("a preset");
        let class = BlockClass::Layer(model.layer_class(layer));
        let trace = models::trace_block(&model, class, &layout).expect("a block");
        let mut ops = trace.forward_ops();
        let scores = ops.find(|op| matches!(op.cost(), CostClass::AttentionScores(_)));
        let kernel = trace.kernel_on_gpu(scores.expect("scores"), &Epilogues::of(&trace), |_| 1);
        assert_eq!(kernel.name, wanted, "{name}");
    }
}
