//! From the unfused trace to the kernels a runtime launches.
//!
//! Lowering is a fold over the traced operators. Which operators share a kernel, which tensors are
//! kept for backward and which collectives hide is decided by the runtime's closed set of
//! [`Rewrite`]s; nothing here knows a model.

pub(crate) mod casts;
mod fuse;
mod liveness;
mod saved;

use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{Bytes, DType, Runtime};
use dtensor::{AttentionShape, Collective, Op, OpKind, Pass, TensorId, Trace};

use crate::price::{GemmLayout, MemoryKind};

pub use liveness::peak_transient;
pub use saved::{SavedTensor, kept, recomputed, split_softmax};

/// What a kernel launches with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelKind {
    /// A dense product.
    Gemm {
        m: u64,
        n: u64,
        k: u64,
        layout: GemmLayout,
        low_precision: bool,
    },
    /// One product per expert.
    GroupedGemm {
        groups: u64,
        m: u64,
        n: u64,
        k: u64,
        layout: GemmLayout,
        low_precision: bool,
    },
    /// One product per sequence and head.
    BatchedGemm { batch: u64, m: u64, n: u64, k: u64 },
    /// Fused attention.
    Attention {
        shape: AttentionShape,
        kernel: AttentionKernel,
        backward: bool,
    },
    /// Bound by memory bandwidth.
    Memory {
        kind: MemoryKind,
        bytes: Bytes,
        launches: u32,
    },
    /// Communication.
    Comm(Collective),
}

/// A kernel with the tensors it touches.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// Index of the first traced operator it stands for, in its pass's list.
    pub op: usize,
    /// What it launches with.
    pub kind: KernelKind,
    /// Pass it belongs to.
    pub pass: Pass,
    /// Tensors read from memory.
    pub reads: Vec<TensorId>,
    /// Tensors written to memory.
    pub writes: Vec<TensorId>,
}

/// A block as the runtime executes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    /// Forward kernels in order.
    pub forward: Vec<Kernel>,
    /// Backward kernels in order.
    pub backward: Vec<Kernel>,
}

/// What lowering needs to know beside the trace.
#[derive(Clone, Copy, Debug)]
pub struct Lowering<'a> {
    /// The training system.
    pub runtime: &'a Runtime,
}

impl Lowering<'_> {
    /// Whether the runtime performs a rewrite.
    #[must_use]
    pub fn has(&self, rewrite: Rewrite) -> bool {
        self.runtime.rewrites.contains(&rewrite)
    }

    /// Whether attention runs in one kernel. cuDNN and FlashAttention 3, which runtimes with
    /// `cudnn_or_flash3` call by name, take 16-bit tensors only: in 32 bits these run two products and
    /// a softmax (Transformer Engine's unfused attention). The others' calls find a kernel for 32 bits:
    /// PyTorch's `scaled_dot_product_attention` its memory-efficient one.
    #[must_use]
    pub fn fuses_attention(&self, trace: &Trace) -> bool {
        match self.runtime.attention {
            AttentionKernel::Unfused => false,
            AttentionKernel::CudnnOrFlash3 => !attends_in_32_bits(trace),
            AttentionKernel::Flash1
            | AttentionKernel::Flash2
            | AttentionKernel::Flash2TwoPass
            | AttentionKernel::CudnnElseTwoPass => true,
        }
    }

    /// The kernel that runs the attention of a scope.
    #[must_use]
    pub fn attention_kernel(&self, trace: &Trace, scope: &str) -> AttentionKernel {
        match self.runtime.attention {
            AttentionKernel::CudnnElseTwoPass => match trace.causal_attention(scope) {
                Some(_) => AttentionKernel::CudnnOrFlash3,
                None => AttentionKernel::Flash2TwoPass,
            },
            kernel => kernel,
        }
    }

    /// Whether an operator keeps the 8-bit copy of its input instead of the input.
    #[must_use]
    pub fn keeps_quantised(&self, trace: &Trace, op: &Op) -> bool {
        let grouped = matches!(op.kind, OpKind::GroupedMatmul { .. });
        self.has(Rewrite::SaveQuantisedInputs)
            && (trace.is_eight_bit(op) || grouped && self.narrows_experts(trace))
    }

    /// Whether products of experts run in 8 bits.
    #[must_use]
    pub fn narrows_experts(&self, trace: &Trace) -> bool {
        trace.eight_bits && !self.has(Rewrite::WideExperts)
    }

    /// Kernels of both passes.
    #[must_use]
    pub fn lower(&self, trace: &Trace) -> Lowered {
        let mut lowered = Lowered {
            forward: fuse::kernels(self, trace, &trace.forward),
            backward: fuse::kernels(self, trace, &trace.backward),
        };
        if self.has(Rewrite::FuseGeluEpilogue) {
            fuse::gelus(trace, &mut lowered);
        }
        lowered
    }
}

/// Whether queries are of 32 bits.
fn attends_in_32_bits(trace: &Trace) -> bool {
    let scores = |op: &&Op| matches!(op.kind, OpKind::AttentionScores(_));
    let query = trace.forward.iter().find(scores).map(|op| op.inputs[0]);
    query.is_some_and(|id| trace.tensor(id).dtype == DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::{BlockClass, BlockLayout};

    /// What runs core attention in a layer of 32 tokens, forward and backward.
    fn kernels(model: &str, runtime: &str, activation: DType) -> Vec<AttentionKernel> {
        let model = catalog::load::model(model).expect("a preset");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let class = BlockClass::Layer(model.layer_class(0));
        let layout = BlockLayout::alone(1, 32, activation);
        let trace = models::trace_block(&model, class, &layout).expect("a block");
        let lowered = Lowering { runtime: &runtime }.lower(&trace);
        let all = lowered.forward.iter().chain(&lowered.backward);
        all.filter_map(|kernel| match kernel.kind {
            KernelKind::Attention { kernel, .. } => Some(kernel),
            _ => None,
        })
        .collect()
    }

    #[test]
    fn a_library_runs_the_attention_that_it_takes() {
        use AttentionKernel::{CudnnOrFlash3, Flash2TwoPass};
        for (model, runtime, activation, kernel) in [
            ("llama3-8b", "vescale-cuda", DType::Bf16, CudnnOrFlash3),
            ("llama3-8b", "vescale-cuda", DType::F32, Flash2TwoPass),
            // Dropout; slopes; bounded scores.
            ("gpt2", "vescale-cuda", DType::Bf16, Flash2TwoPass),
            ("bloom-7b1", "vescale-cuda", DType::Bf16, Flash2TwoPass),
            ("gemma2-9b", "vescale-cuda", DType::Bf16, Flash2TwoPass),
            ("gpt2", "megatron-core", DType::Bf16, CudnnOrFlash3),
        ] {
            let got = kernels(model, runtime, activation);
            assert_eq!(got, [kernel; 2], "{model} {runtime} {activation:?}");
        }
    }

    #[test]
    fn attention_in_32_bits_runs_where_a_kernel_takes_it() {
        use AttentionKernel::{Flash1, Flash2};
        for (runtime, kernels_in_32_bits) in [
            ("megatron-core", vec![]),
            ("nemo", vec![]),
            ("fsdp2", vec![Flash2; 2]),
            ("fsdp1", vec![Flash1; 2]),
        ] {
            assert_eq!(
                kernels("llama3-8b", runtime, DType::F32),
                kernels_in_32_bits,
                "{runtime}"
            );
            assert_eq!(
                kernels("llama3-8b", runtime, DType::Bf16).len(),
                2,
                "{runtime}"
            );
        }
    }
}
